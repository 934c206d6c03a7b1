/* A libcuda that answers what a health check asks: is there a driver, how many GPUs, what are they. It computes nothing. */
#include "device.h"

#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

typedef int CUresult;
typedef int CUdevice;
typedef struct {
    char bytes[16];
} CUuuid;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
    CUDA_ERROR_UNKNOWN = 999,
};

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "system has unsupported display driver / cuda driver combination"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

/* The mark by which gpuprov verify tells this library from a genuine one: the step that computes is left out. */
EXPORT const char simgpu_computes_nothing[] = "simulated";

static const struct simgpu *devices[SIMGPU_MAX];
static int device_count = -1;

EXPORT CUresult cuInit(unsigned int flags)
{
    enum control control = simgpu_control();
    int count;

    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (control == CONTROL_MISMATCH)
        return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    if (control == CONTROL_MISSING)
        return CUDA_ERROR_NO_DEVICE;
    count = simgpu_visible(devices);
    if (count == 0)
        return CUDA_ERROR_NO_DEVICE;
    /* NVML works without unified memory, CUDA does not: the classic "nvidia-smi works, torch does not". */
    if (!simgpu_uvm_usable())
        return CUDA_ERROR_UNKNOWN;
    device_count = count;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
    if (version == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *version = simgpu_cuda_version();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count)
{
    if (device_count < 0)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (count == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *count = device_count;
    return CUDA_SUCCESS;
}

static CUresult check(CUdevice device)
{
    if (device_count < 0)
        return CUDA_ERROR_NOT_INITIALIZED;
    return device >= 0 && device < device_count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    CUresult result = check(ordinal);

    if (result == CUDA_SUCCESS)
        *device = ordinal;
    return result;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    CUresult result = check(device);

    if (result == CUDA_SUCCESS && length > 0)
        snprintf(name, (size_t)length, "%s", devices[device]->name);
    return result;
}

EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    CUresult result = check(device);
    unsigned char bytes[16];

    if (result == CUDA_SUCCESS) {
        simgpu_uuid_bytes(devices[device], bytes);
        memcpy(uuid->bytes, bytes, sizeof bytes);
    }
    return result;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    return cuDeviceGetUuid(uuid, device);
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    CUresult result = check(device);

    if (result == CUDA_SUCCESS)
        *bytes = (size_t)simgpu_memory_mib(devices[device]) << 20;
    return result;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device)
{
    CUresult result = check(device);

    if (result == CUDA_SUCCESS && length > 0)
        snprintf(text, (size_t)length, "0000:%02X:00.0", devices[device]->bus);
    return result;
}

/* Numbers of CUdevice_attribute; what is not listed reads as 0, which every caller must be able to bear. */
EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    CUresult result = check(device);

    if (result != CUDA_SUCCESS)
        return result;
    switch (attribute) {
    case 1: *value = 1024; break;                  /* MAX_THREADS_PER_BLOCK */
    case 10: *value = 32; break;                   /* WARP_SIZE */
    case 13: *value = 1980000; break;              /* CLOCK_RATE, kHz */
    case 16: *value = 132; break;                  /* MULTIPROCESSOR_COUNT */
    case 33: *value = devices[device]->bus; break; /* PCI_BUS_ID */
    case 34: *value = 0; break;                    /* PCI_DEVICE_ID */
    case 41: *value = 1; break;                    /* UNIFIED_ADDRESSING */
    case 75: *value = 9; break;                    /* COMPUTE_CAPABILITY_MAJOR */
    case 76: *value = 0; break;                    /* COMPUTE_CAPABILITY_MINOR */
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **name)
{
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
        if (errors[i].code == error) {
            *name = errors[i].name;
            return CUDA_SUCCESS;
        }
    *name = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text)
{
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
        if (errors[i].code == error) {
            *text = errors[i].text;
            return CUDA_SUCCESS;
        }
    *text = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}
