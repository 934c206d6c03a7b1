// A module that only holds the driver's name and major number, so that a real kernel opens the device nodes.
#include <linux/fs.h>
#include <linux/init.h>
#include <linux/module.h>

#define NVIDIA_MAJOR 195

static const struct file_operations operations = {.owner = THIS_MODULE};

static int __init simulated_init(void)
{
	pr_info("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  @VERSION@ (simulated)\n");
	return register_chrdev(NVIDIA_MAJOR, "nvidia", &operations);
}

static void __exit simulated_exit(void)
{
	unregister_chrdev(NVIDIA_MAJOR, "nvidia");
}

module_init(simulated_init);
module_exit(simulated_exit);
MODULE_LICENSE("@LICENSE@");
MODULE_VERSION("@VERSION@");
MODULE_DESCRIPTION("Simulated GPU driver");
