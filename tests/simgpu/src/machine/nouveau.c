// A driver with nouveau's name and aliases: it takes the GPUs at boot, unless it is blacklisted, and can't be unloaded.
#include <linux/init.h>
#include <linux/module.h>
#include <linux/pci.h>

static const struct pci_device_id devices[] = {
	{PCI_DEVICE(PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID), .class = PCI_BASE_CLASS_DISPLAY << 16, .class_mask = 0xff << 16},
	{}
};
MODULE_DEVICE_TABLE(pci, devices);

// As with a console on it: somebody uses the module for as long as the machine runs.
static int simulated_probe(struct pci_dev *device, const struct pci_device_id *id)
{
	__module_get(THIS_MODULE);
	return 0;
}

static struct pci_driver simulated_driver = {.name = "nouveau", .id_table = devices, .probe = simulated_probe};

module_pci_driver(simulated_driver);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Stands for nouveau");
