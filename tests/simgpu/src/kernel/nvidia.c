// A module with the driver's name, major number and version file, so that on a real kernel the nodes open.
#include <linux/fs.h>
#include <linux/init.h>
#include <linux/module.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>

#define NVIDIA_MAJOR 195

static const struct file_operations operations = {.owner = THIS_MODULE};

// The other modules of the driver need this one, and so does the order of unloading.
int simulated_nvidia_is_loaded(void);

int simulated_nvidia_is_loaded(void)
{
	return 1;
}
EXPORT_SYMBOL(simulated_nvidia_is_loaded);

static int show_version(struct seq_file *file, void *unused)
{
	seq_puts(file, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  @VERSION@  Tue Apr  8 12:41:17 UTC 2025\n");
	seq_puts(file, "GCC version:  gcc version " __VERSION__ "\n");
	return 0;
}

static int __init simulated_init(void)
{
	int result = register_chrdev(NVIDIA_MAJOR, "nvidia", &operations);

	if (result < 0)
		return result;
	proc_mkdir("driver/nvidia", NULL);
	proc_create_single("driver/nvidia/version", 0444, NULL, show_version);
	pr_info("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  @VERSION@ (simulated)\n");
	return 0;
}

static void __exit simulated_exit(void)
{
	remove_proc_subtree("driver/nvidia", NULL);
	unregister_chrdev(NVIDIA_MAJOR, "nvidia");
}

module_init(simulated_init);
module_exit(simulated_exit);
MODULE_LICENSE("@LICENSE@");
MODULE_VERSION("@VERSION@");
MODULE_DESCRIPTION("Simulated GPU driver");
