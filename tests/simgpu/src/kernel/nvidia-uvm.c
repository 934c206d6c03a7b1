// Unified memory: a character device whose major number the kernel chooses, as for the real one.
#include <linux/fs.h>
#include <linux/init.h>
#include <linux/module.h>

int simulated_nvidia_is_loaded(void);

static const struct file_operations operations = {.owner = THIS_MODULE};
static int major_number;

static int __init simulated_init(void)
{
	simulated_nvidia_is_loaded();
	major_number = register_chrdev(0, "nvidia-uvm", &operations);
	return major_number < 0 ? major_number : 0;
}

static void __exit simulated_exit(void)
{
	unregister_chrdev(major_number, "nvidia-uvm");
}

module_init(simulated_init);
module_exit(simulated_exit);
MODULE_LICENSE("@LICENSE@");
MODULE_VERSION("@VERSION@");
MODULE_DESCRIPTION("Simulated GPU driver: unified memory");
