// A module with the driver's name, major number and files in /proc, so that on a real kernel the nodes open.
#include <linux/fs.h>
#include <linux/init.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>

#include "gpus.h"

#define NVIDIA_MAJOR 195
#define MODESET_MINOR 254
#define CONTROL_MINOR 255

// The GPUs that the PCI bus has, by their place in the table, which is their minor.
static bool bound[ARRAY_SIZE(gpus)];

// The other modules of the driver need this one, and so does the order of unloading.
int simulated_nvidia_is_loaded(void);

int simulated_nvidia_is_loaded(void)
{
	return 1;
}
EXPORT_SYMBOL(simulated_nvidia_is_loaded);

static int open_node(struct inode *inode, struct file *file)
{
	unsigned int minor = iminor(inode);

	return minor >= MODESET_MINOR || (minor < ARRAY_SIZE(gpus) && bound[minor]) ? 0 : -ENODEV;
}

static const struct file_operations operations = {.owner = THIS_MODULE, .open = open_node};

// The driver's three names in /proc/devices, as since 550.40.07.
static const struct {
	unsigned int first, count;
	const char *name;
} nodes[] = {
	{0, MODESET_MINOR, "nvidia"},
	{MODESET_MINOR, 1, "nvidia-modeset"},
	{CONTROL_MINOR, 1, "nvidiactl"},
};

static int show_version(struct seq_file *file, void *unused)
{
	seq_puts(file, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  @VERSION@  Tue Apr  8 12:41:17 UTC 2025\n");
	seq_puts(file, "GCC version:  gcc version " __VERSION__ "\n");
	return 0;
}

static int show_information(struct seq_file *file, void *unused)
{
	seq_puts(file, (const char *)file->private);
	return 0;
}

static int simulated_probe(struct pci_dev *device, const struct pci_device_id *id)
{
	struct proc_dir_entry *folder;
	unsigned int minor;
	char path[64];

	for (minor = 0; minor < ARRAY_SIZE(gpus); minor++)
		if (strcmp(gpus[minor].bus_id, pci_name(device)) == 0)
			break;
	if (minor == ARRAY_SIZE(gpus))
		return -ENODEV;
	bound[minor] = true;
	snprintf(path, sizeof(path), "driver/nvidia/gpus/%s", pci_name(device));
	folder = proc_mkdir(path, NULL);
	if (folder)
		proc_create_single_data("information", 0444, folder, show_information, (void *)gpus[minor].information);
	return 0;
}

static const struct pci_device_id devices[] = {
	{PCI_DEVICE(PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID), .class = PCI_CLASS_DISPLAY_3D << 8, .class_mask = ~0},
	{}
};
MODULE_DEVICE_TABLE(pci, devices);

static struct pci_driver simulated_driver = {.name = "nvidia", .id_table = devices, .probe = simulated_probe};

static void leave(unsigned int registered)
{
	while (registered-- > 0)
		__unregister_chrdev(NVIDIA_MAJOR, nodes[registered].first, nodes[registered].count, nodes[registered].name);
	remove_proc_subtree("driver/nvidia", NULL);
}

static int __init simulated_init(void)
{
	unsigned int number;
	int result;

	proc_mkdir("driver/nvidia", NULL);
	proc_mkdir("driver/nvidia/gpus", NULL);
	proc_create_single("driver/nvidia/version", 0444, NULL, show_version);
	for (number = 0; number < ARRAY_SIZE(nodes); number++) {
		result = __register_chrdev(NVIDIA_MAJOR, nodes[number].first, nodes[number].count, nodes[number].name,
					   &operations);
		if (result < 0) {
			leave(number);
			return result;
		}
	}
	result = pci_register_driver(&simulated_driver);
	if (result < 0) {
		leave(ARRAY_SIZE(nodes));
		return result;
	}
	pr_info("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  @VERSION@ (simulated)\n");
	return 0;
}

static void __exit simulated_exit(void)
{
	pci_unregister_driver(&simulated_driver);
	leave(ARRAY_SIZE(nodes));
}

module_init(simulated_init);
module_exit(simulated_exit);
MODULE_LICENSE("@LICENSE@");
MODULE_VERSION("@VERSION@");
MODULE_DESCRIPTION("Simulated GPU driver");
