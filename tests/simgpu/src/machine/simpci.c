// PCI buses with a GPU's configuration space on each, for a virtual machine that has none: all that stands above it
// (sysfs, udev, module aliases, the binding of drivers) is the kernel's own.
#include <linux/init.h>
#include <linux/module.h>
#include <linux/pci.h>

static const u8 bus_numbers[] = {@BUSES@};

static unsigned int gpus = 2;
module_param(gpus, uint, 0444);
MODULE_PARM_DESC(gpus, "how many");

static struct pci_sysdata sysdata[ARRAY_SIZE(bus_numbers)];
static struct pci_bus *buses[ARRAY_SIZE(bus_numbers)];

// One device a bus, with no resources: the base address registers read as zero, whatever is written.
static int read_config(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 *value)
{
	u32 word = 0;

	if (devfn != 0) {
		*value = ~0;
		return PCIBIOS_DEVICE_NOT_FOUND;
	}
	switch (where & ~3) {
	case PCI_VENDOR_ID:
		word = @DEVICE@ << 16 | @VENDOR@;
		break;
	case PCI_CLASS_REVISION:
		word = PCI_CLASS_DISPLAY_3D << 16 | 0xa1;
		break;
	case PCI_SUBSYSTEM_VENDOR_ID:
		word = @SUBSYSTEM_DEVICE@ << 16 | @SUBSYSTEM_VENDOR@;
		break;
	}
	word >>= (where & 3) * 8;
	*value = size == 1 ? word & 0xff : size == 2 ? word & 0xffff : word;
	return PCIBIOS_SUCCESSFUL;
}

static int write_config(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 value)
{
	return PCIBIOS_SUCCESSFUL;
}

static struct pci_ops operations = {.read = read_config, .write = write_config};

static int __init simpci_init(void)
{
	unsigned int number;

	for (number = 0; number < min_t(unsigned int, gpus, ARRAY_SIZE(bus_numbers)); number++) {
		LIST_HEAD(resources);

		sysdata[number].node = NUMA_NO_NODE;
		pci_add_resource(&resources, &ioport_resource);
		pci_add_resource(&resources, &iomem_resource);
		pci_lock_rescan_remove();
		buses[number] = pci_scan_root_bus(NULL, bus_numbers[number], &operations, &sysdata[number], &resources);
		if (buses[number])
			pci_bus_add_devices(buses[number]);
		else
			pci_free_resource_list(&resources);
		pci_unlock_rescan_remove();
	}
	return 0;
}

// There is no way out: a machine's GPUs stay where they are.
module_init(simpci_init);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Simulated GPUs on the PCI bus");
