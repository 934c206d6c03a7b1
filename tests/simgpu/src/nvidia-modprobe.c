/* Creates the driver's device nodes, as nvidia-modprobe does for programs that may not: it is installed setuid root.
 *
 *   nvidia-modprobe            loads the module, where the kernel takes any, and creates /dev/nvidiactl
 *   nvidia-modprobe -c N …     creates /dev/nvidiaN, N = 255 for nvidiactl; several -c are allowed
 *   nvidia-modprobe -u         the unified memory module too: with -c 0 also /dev/nvidia-uvm and -uvm-tools
 *   nvidia-modprobe -m         /dev/nvidia-modeset
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#define NVIDIA_MAJOR 195

static int create(const char *path, unsigned int major_number, unsigned int minor_number)
{
    umask(0);
    if (mknod(path, S_IFCHR | 0666, makedev(major_number, minor_number)) == 0 || errno == EEXIST)
        return 0;
    fprintf(stderr, "nvidia-modprobe: cannot create %s: %s\n", path, strerror(errno));
    return 1;
}

/* The major number of unified memory is dynamic: the kernel tells it in /proc/devices. */
static int dynamic_major(const char *name)
{
    char line[128], found[64];
    int number, result = -1;
    FILE *devices = fopen("/proc/devices", "re");

    if (devices == NULL)
        return -1;
    while (fgets(line, sizeof line, devices) != NULL)
        if (sscanf(line, "%d %63s", &number, found) == 2 && strcmp(found, name) == 0)
            result = number;
    fclose(devices);
    return result;
}

/* Whether it helped, /proc/devices says. */
static void load(const char *module)
{
    pid_t child;

    if (dynamic_major(module) >= 0 || access("/proc/modules", F_OK) != 0)
        return;
    child = fork();
    if (child == 0) {
        execl("/sbin/modprobe", "modprobe", "-q", module, (char *)NULL);
        _exit(127);
    }
    if (child > 0)
        waitpid(child, NULL, 0);
}

static int create_uvm(void)
{
    int number = dynamic_major("nvidia-uvm");

    if (number < 0) {
        fprintf(stderr, "nvidia-modprobe: no nvidia-uvm in /proc/devices\n");
        return 1;
    }
    return create("/dev/nvidia-uvm", (unsigned int)number, 0) | create("/dev/nvidia-uvm-tools", (unsigned int)number, 1);
}

int main(int argc, char **argv)
{
    int option, unified_memory = 0, modeset = 0, result = 0, minors[32], count = 0;
    char path[64];

    while ((option = getopt(argc, argv, "c:uml")) != -1) {
        if (option == 'c' && count < 32)
            minors[count++] = atoi(optarg);
        else if (option == 'u')
            unified_memory = 1;
        else if (option == 'm')
            modeset = 1;
        else if (option != 'l')
            return 1;
    }
    load("nvidia");
    if (unified_memory) {
        load("nvidia-uvm");
        return count > 0 ? create_uvm() : 0;
    }
    if (modeset)
        result |= create("/dev/nvidia-modeset", NVIDIA_MAJOR, 254);
    for (int i = 0; i < count; i++) {
        if (minors[i] == 255)
            continue;
        snprintf(path, sizeof path, "/dev/nvidia%d", minors[i]);
        result |= create(path, NVIDIA_MAJOR, (unsigned int)minors[i]);
    }
    return result | create("/dev/nvidiactl", NVIDIA_MAJOR, 255);
}
