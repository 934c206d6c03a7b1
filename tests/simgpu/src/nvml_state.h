/* What the two halves of the NVML stub share. */
#ifndef SIMGPU_NVML_STATE_H
#define SIMGPU_NVML_STATE_H

#include "device.h"

extern const struct simgpu *nvml_gpus[SIMGPU_MAX];
extern int nvml_gpu_count; /* -1: not initialised */

/* nvml.h spells old function names as new ones by macro; both are defined here. What it declares is exported. */
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#pragma GCC visibility push(default)
#include <nvml.h>
#pragma GCC visibility pop

/* The real functions refuse a buffer that is too small instead of cutting the text. */
nvmlReturn_t nvml_copy_text(char *target, unsigned int size, const char *text);

/* A handle is the address of a table row; anything else came from a caller's bug and gives NULL. */
const struct simgpu *nvml_row(nvmlDevice_t device);

/* The MIG device that a handle stands for, NULL if it stands for a GPU. */
const struct simgpu_mig *nvml_mig(nvmlDevice_t device);

/* What the kernel module keeps of a GPU under this name; NVML_ERROR_NOT_SUPPORTED: nothing. */
nvmlReturn_t nvml_number(const struct simgpu *gpu, const char *name, unsigned int *number);

#define GET_ROW(gpu, device, out)                                                \
    const struct simgpu *gpu = nvml_row(device);                                 \
    if (nvml_gpu_count < 0)                                                      \
        return NVML_ERROR_UNINITIALIZED;                                         \
    if (gpu == NULL || (out) == NULL)                                            \
        return NVML_ERROR_INVALID_ARGUMENT

#endif
