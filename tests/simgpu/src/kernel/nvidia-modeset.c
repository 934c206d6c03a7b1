// Modesetting: present in lsmod, as on a real machine, and nothing else.
#include <linux/init.h>
#include <linux/module.h>

int simulated_nvidia_is_loaded(void);

static int __init simulated_init(void)
{
	simulated_nvidia_is_loaded();
	return 0;
}

static void __exit simulated_exit(void)
{
}

module_init(simulated_init);
module_exit(simulated_exit);
MODULE_LICENSE("@LICENSE@");
MODULE_VERSION("@VERSION@");
MODULE_DESCRIPTION("Simulated GPU driver: modesetting");
