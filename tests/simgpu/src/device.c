/* Which GPUs exist is decided as a real driver decides it: by the device nodes. That way a container sees exactly
 * the GPUs it was given, with no configuration inside it, and a wrong device cgroup rule shows as a missing GPU. */
#include "device.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysmacros.h>
#include <sys/syscall.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simgpu_table.h"

#define NVIDIA_MAJOR 195
#define CONTROL_MINOR 255

/* stat(2) by number: the symbol stat@GLIBC_2.33 would keep the libraries from loading on older distributions. */
static bool is_character_device(const char *path, unsigned int *major_number, unsigned int *minor_number)
{
    struct stat status;

    if (syscall(SYS_newfstatat, AT_FDCWD, path, &status, 0) != 0 || !S_ISCHR(status.st_mode))
        return false;
    *major_number = major(status.st_rdev);
    *minor_number = minor(status.st_rdev);
    return true;
}

/* An allowed node without a driver behind it gives ENXIO; EPERM is the device cgroup's no, EACCES the file mode's. */
static bool may_open(const char *path)
{
    int descriptor = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);

    if (descriptor >= 0) {
        close(descriptor);
        return true;
    }
    return errno != EPERM && errno != EACCES && errno != ENOENT;
}

static bool is_usable_node(const char *path, unsigned int expected_minor)
{
    unsigned int major_number, minor_number;

    return is_character_device(path, &major_number, &minor_number) && major_number == NVIDIA_MAJOR &&
           minor_number == expected_minor && may_open(path);
}

const char *simgpu_setting(const char *name, char *buffer, size_t size)
{
    char variable[64] = "SIMGPU_";
    size_t length = strlen(variable);
    const char *value;
    char line[256];
    FILE *file;

    for (const char *c = name; *c != '\0' && length + 1 < sizeof variable; c++)
        variable[length++] = (char)toupper((unsigned char)*c);
    variable[length] = '\0';
    value = getenv(variable);
    if (value != NULL) {
        snprintf(buffer, size, "%s", value);
        return buffer;
    }
    file = fopen("/etc/simgpu.conf", "re");
    if (file == NULL)
        return NULL;
    value = NULL;
    while (value == NULL && fgets(line, sizeof line, file) != NULL) {
        size_t key = strlen(name);

        if (strncmp(line, name, key) == 0 && line[key] == '=') {
            line[strcspn(line, "\r\n")] = '\0';
            snprintf(buffer, size, "%s", line + key + 1);
            value = buffer;
        }
    }
    fclose(file);
    return value;
}

const char *simgpu_driver_version(void)
{
    static char version[80];

    if (simgpu_setting("driver_version", version, sizeof version) == NULL)
        snprintf(version, sizeof version, "%s", SIMGPU_DRIVER_VERSION);
    return version;
}

int simgpu_cuda_version(void)
{
    char text[32];
    int major_number = 0, minor_number = 0;

    if (simgpu_setting("cuda_version", text, sizeof text) == NULL)
        snprintf(text, sizeof text, "%s", SIMGPU_CUDA_VERSION);
    sscanf(text, "%d.%d", &major_number, &minor_number);
    return major_number * 1000 + minor_number * 10;
}

/* The kernel module names its version in /proc; after an upgrade without a reboot it is not the library's. */
static bool kernel_has_another_version(void)
{
    char text[1024], *end;
    size_t length;
    const char *found, *version = simgpu_driver_version();
    FILE *file = fopen("/proc/driver/nvidia/version", "re");

    if (file == NULL)
        return false;
    length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = '\0';
    end = strchr(text, '\n');
    if (end != NULL)
        *end = '\0'; /* the second line names the compiler, whose version is nobody's business here */
    found = strstr(text, version);
    return found == NULL || isdigit((unsigned char)found[strlen(version)]) || found[strlen(version)] == '.';
}

enum control simgpu_control(void)
{
    if (!is_usable_node("/dev/nvidiactl", CONTROL_MINOR))
        return CONTROL_MISSING;
    return kernel_has_another_version() ? CONTROL_MISMATCH : CONTROL_OK;
}

int simgpu_visible(const struct simgpu *gpus[SIMGPU_MAX])
{
    char path[32], text[32];
    int count = 0, limit = SIMGPU_MAX;

    if (simgpu_setting("gpus", text, sizeof text) != NULL)
        limit = atoi(text);
    for (int i = 0; i < SIMGPU_MAX && count < limit; i++) {
        snprintf(path, sizeof path, "/dev/nvidia%d", simgpu_table[i].minor);
        if (is_usable_node(path, (unsigned int)simgpu_table[i].minor))
            gpus[count++] = &simgpu_table[i];
    }
    return count;
}

/* Unified memory's major number is dynamic, so only presence and permission can be asked for. */
bool simgpu_uvm_usable(void)
{
    unsigned int major_number, minor_number;

    return is_character_device("/dev/nvidia-uvm", &major_number, &minor_number) && may_open("/dev/nvidia-uvm");
}

/* mig=all, or the minor numbers: mig=0,3; without that, a GPU is divided whose parts this process may use. */
bool simgpu_mig_enabled(const struct simgpu *gpu)
{
    char text[128], *position = NULL;
    struct simgpu_mig found[SIMGPU_MIG_MAX];

    if (simgpu_setting("mig", text, sizeof text) == NULL)
        return simgpu_mig_devices(gpu, found) > 0;
    if (strcmp(text, "all") == 0)
        return true;
    for (char *word = strtok_r(text, ", ", &position); word != NULL; word = strtok_r(NULL, ", ", &position))
        if (atoi(word) == gpu->minor)
            return true;
    return false;
}

/* A GPU has 15 instances of 8 compute instances at most, and each of them a minor, whether it exists or not: mig-minors
 * of a real driver counts from 3, GPU by GPU. */
static bool may_use_capability(const struct simgpu *gpu, unsigned int instance, int compute_instance)
{
    char path[64];
    unsigned int number = 3 + (unsigned int)gpu->minor * 135 + instance * 9 + (unsigned int)(compute_instance + 1);
    unsigned int major_number, minor_number;

    snprintf(path, sizeof path, "/dev/nvidia-caps/nvidia-cap%u", number);
    return is_character_device(path, &major_number, &minor_number) && minor_number == number && may_open(path);
}

int simgpu_mig_devices(const struct simgpu *gpu, struct simgpu_mig found[SIMGPU_MIG_MAX])
{
    int count = 0;

    for (unsigned int instance = 1; instance <= SIMGPU_MIG_MAX; instance++)
        if (may_use_capability(gpu, instance, -1) && may_use_capability(gpu, instance, 0))
            found[count++] = (struct simgpu_mig){gpu, instance, 0};
    return count;
}

void simgpu_mig_uuid(const struct simgpu_mig *mig, char *text, size_t size)
{
    snprintf(text, size, "MIG-%s", mig->gpu->uuid + strlen("GPU-"));
    /* The last two digits tell the instances apart. */
    snprintf(text + strlen(text) - 2, 3, "%x%x", mig->gpu_instance, mig->compute_instance);
}

unsigned long long simgpu_memory_mib(const struct simgpu *gpu)
{
    char text[32];

    return simgpu_setting("memory", text, sizeof text) != NULL ? (unsigned long long)atoll(text) : gpu->memory_mib;
}

/* On the host a file /run/simgpu/NAME-MINOR has each number. Containers don't have that folder, but they have the GPU's
 * firmware mounted: there, simgpu.state may have lines NAME-MINOR=NUMBER. */
bool simgpu_number(const struct simgpu *gpu, const char *name, unsigned int *number)
{
    char path[128], line[128], key[64];
    bool found = false;
    FILE *file;

    snprintf(path, sizeof path, "/run/simgpu/%s-%d", name, gpu->minor);
    file = fopen(path, "re");
    if (file != NULL) {
        found = fscanf(file, "%u", number) == 1;
        fclose(file);
        return found;
    }
    snprintf(path, sizeof path, "/lib/firmware/nvidia/%s/simgpu.state", simgpu_driver_version());
    snprintf(key, sizeof key, "%s-%d=", name, gpu->minor);
    file = fopen(path, "re");
    while (file != NULL && !found && fgets(line, sizeof line, file) != NULL)
        found = strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), "%u", number) == 1;
    if (file != NULL)
        fclose(file);
    return found;
}

void simgpu_uuid_bytes(const struct simgpu *gpu, unsigned char bytes[16])
{
    const char *hex = gpu->uuid + strlen("GPU-");

    for (int i = 0; i < 16; i++) {
        unsigned int byte;

        if (*hex == '-')
            hex++;
        sscanf(hex, "%2x", &byte);
        bytes[i] = (unsigned char)byte;
        hex += 2;
    }
}
