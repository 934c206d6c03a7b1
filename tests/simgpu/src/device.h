/* What the simulated kernel would answer: which GPUs this process may open, and with which attributes.
 *
 * Shared by the NVML and the CUDA stub, so that both always see the same GPUs. The table itself is generated
 * from gpus.py (simgpu_table.h): Python and C can never disagree about a UUID. */
#ifndef SIMGPU_DEVICE_H
#define SIMGPU_DEVICE_H

#include <stdbool.h>
#include <stddef.h>

#define SIMGPU_MAX 16

struct simgpu {
    int minor;
    const char *name;
    const char *uuid; /* GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx */
    unsigned char bus;
    unsigned int pci_device_id;    /* device << 16 | vendor, as NVML and PCI configuration space have it */
    unsigned int pci_subsystem_id; /* likewise */
    unsigned long long memory_mib;
    const char *serial;
    const char *vbios;
};

enum control { CONTROL_OK, CONTROL_MISSING, CONTROL_MISMATCH };

/* The control node and the kernel's version: what a driver library looks at before anything else. */
enum control simgpu_control(void);

/* The GPUs whose nodes this process may open, in order of minor number; returns their count. */
int simgpu_visible(const struct simgpu *gpus[SIMGPU_MAX]);

bool simgpu_uvm_usable(void);
bool simgpu_mig_enabled(const struct simgpu *gpu);
/* Two GPU instances of one compute instance each, as `nvidia-smi mig -cgi 3g.40gb,3g.40gb -C` makes them; they exist
 * for a process that may open both capability nodes, as with the real driver. */
#define SIMGPU_MIG_MAX 2
struct simgpu_mig {
    const struct simgpu *gpu;
    unsigned int gpu_instance, compute_instance;
};
int simgpu_mig_devices(const struct simgpu *gpu, struct simgpu_mig found[SIMGPU_MIG_MAX]);
void simgpu_mig_uuid(const struct simgpu_mig *mig, char *text, size_t size);
unsigned long long simgpu_memory_mib(const struct simgpu *gpu);

/* What the simulated kernel keeps of a GPU: false if there is no such number. */
bool simgpu_number(const struct simgpu *gpu, const char *name, unsigned int *number);

/* The bytes of a UUID, as cuDeviceGetUuid hands them out. */
void simgpu_uuid_bytes(const struct simgpu *gpu, unsigned char bytes[16]);

/* An override by name: SIMGPU_<NAME> from the environment, else the key <name> in /etc/simgpu.conf, else NULL. */
const char *simgpu_setting(const char *name, char *buffer, size_t size);
const char *simgpu_driver_version(void);
int simgpu_cuda_version(void); /* 12040 for 12.4 */

#endif
