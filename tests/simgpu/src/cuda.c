/* A libcuda that answers what a health check asks: is there a driver, how many GPUs, what are they. It computes nothing. */
#include "device.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

typedef int CUresult;
typedef int CUdevice;
typedef struct {
    char bytes[16];
} CUuuid;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
    CUDA_ERROR_UNKNOWN = 999,
};

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
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

/* Work takes simulated time only, which events tell: figures depend on no clock of the machine. It starts with the
 * process. Numbers that a test writes (simgpu_number) are faults: clock, host-link and peer-link in percent of normal,
 * dies-after in simulated seconds, wrong-sums, hangs. */
enum fault { CLOCK, HOST_LINK, PEER_LINK, DIES_AFTER, WRONG_SUMS, HANGS, FAULTS };
static const struct {
    const char *name;
    unsigned int normal;
} fault_names[FAULTS] = {{"clock", 100},          {"host-link", 100}, {"peer-link", 100},
                         {"dies-after", 1000000}, {"wrong-sums", 0},  {"hangs", 0}};
struct work {
    int ordinal; /* plus 1: 0 is no context */
    double milliseconds;
    uint64_t next;
    unsigned int faults[FAULTS];
};
static struct work contexts[SIMGPU_MAX], *current;

#define ON_GPU (1ull << 60)
#define LAUNCH_MILLISECONDS 10.0
#define GPU_OF(place) (((place) & ON_GPU) ? (int)((place) >> 48 & 0xff) : -1)

static unsigned int state(int ordinal, enum fault fault)
{
    return contexts[ordinal].faults[fault];
}

/* Every fault that a GPU has shows in the calls that use it. */
static CUresult work(double milliseconds)
{
    int ordinal;

    if (current == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    ordinal = current->ordinal - 1;
    while (state(ordinal, HANGS))
        pause();
    /* No two GPUs are quite the same. */
    current->milliseconds += milliseconds * (1 + devices[ordinal]->minor / 1000.0);
    return current->milliseconds > 1000.0 * state(ordinal, DIES_AFTER) ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(void **context, CUdevice device)
{
    CUresult result = check(device);

    if (result == CUDA_SUCCESS) {
        contexts[device].ordinal = device + 1;
        for (int i = 0; i < FAULTS; i++)
            if (!simgpu_number(devices[device], fault_names[i].name, &contexts[device].faults[i]))
                contexts[device].faults[i] = fault_names[i].normal;
        *context = &contexts[device];
    }
    return result;
}

EXPORT CUresult cuCtxSetCurrent(void *context)
{
    current = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadData(void **module, const char *text)
{
    *module = (void *)(uintptr_t)text;
    return strstr(text, ".entry") != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuModuleGetFunction(void **function, void *module, const char *name)
{
    *function = strstr(module, name);
    return *function != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *available, size_t *total)
{
    if (current == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    *total = (size_t)simgpu_memory_mib(devices[current->ordinal - 1]) << 20;
    *available = *total - *total / 64;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAlloc_v2(uint64_t *place, size_t size)
{
    size_t available, total;
    CUresult result = cuMemGetInfo_v2(&available, &total);

    if (result != CUDA_SUCCESS)
        return result;
    if (size > available)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *place = ON_GPU | (uint64_t)(current->ordinal - 1) << 48 | current->next;
    current->next += size;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemFree_v2(uint64_t place)
{
    return place & ON_GPU ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuMemAllocHost_v2(void **place, size_t size)
{
    *place = malloc(size > 4096 ? 4096 : size); /* nothing is copied */
    return *place != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemFreeHost(void *place)
{
    free(place);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemcpyHtoD_v2(uint64_t target, const void *source, size_t size)
{
    (void)source, (void)size;
    return target & ON_GPU ? work(0) : CUDA_ERROR_INVALID_VALUE;
}

/* What a program reads back is 0: no wrong results, unless a test wants some. */
EXPORT CUresult cuMemcpyDtoH_v2(void *target, uint64_t source, size_t size)
{
    CUresult result = source & ON_GPU ? work(0) : CUDA_ERROR_INVALID_VALUE;

    memset(target, 0, size);
    if (result == CUDA_SUCCESS && size >= sizeof(unsigned int))
        *(unsigned int *)target = state(current->ordinal - 1, WRONG_SUMS);
    return result;
}

/* Rates of an H100 with PCIe 5.0 and NVLink 4, in bytes per millisecond. */
EXPORT CUresult cuMemcpyAsync(uint64_t target, uint64_t source, size_t size, void *stream)
{
    int to = GPU_OF(target), from = GPU_OF(source);
    unsigned int percent, other;

    if (stream != NULL || (to < 0 && from < 0))
        return CUDA_ERROR_INVALID_VALUE;
    if (to == from)
        return work((double)size / 2.5e9 * 100 / state(to, CLOCK));
    if (to < 0 || from < 0)
        return work((double)size / (to < 0 ? 5.4e7 : 5.5e7) * 100 / state(to < 0 ? from : to, HOST_LINK));
    percent = state(to, PEER_LINK);
    other = state(from, PEER_LINK);
    return work((double)size / 3.8e8 * 100 / (other < percent ? other : percent));
}

EXPORT CUresult cuLaunchKernel(void *function, unsigned int x, unsigned int y, unsigned int z, unsigned int threads,
                               unsigned int threads_y, unsigned int threads_z, unsigned int shared, void *stream,
                               void **arguments, void **extra)
{
    if (function == NULL || arguments == NULL || x == 0 || y * z * threads_y * threads_z != 1 || threads > 1024 ||
        shared != 0 || stream != NULL || extra != NULL || current == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return work(LAUNCH_MILLISECONDS * 100 / state(current->ordinal - 1, CLOCK));
}

EXPORT CUresult cuCtxSynchronize(void)
{
    return work(0);
}

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    *can = device != peer;
    return check(device) != CUDA_SUCCESS ? check(device) : check(peer);
}

EXPORT CUresult cuCtxEnablePeerAccess(void *context, unsigned int flags)
{
    return context == NULL || context == current || flags != 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuCtxDisablePeerAccess(void *context)
{
    return context == NULL || context == current ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuEventCreate(double **event, unsigned int flags)
{
    (void)flags;
    *event = calloc(1, sizeof **event);
    return *event != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuEventRecord(double *event, void *stream)
{
    CUresult result = stream == NULL ? work(0) : CUDA_ERROR_INVALID_VALUE;

    if (result == CUDA_SUCCESS)
        *event = current->milliseconds;
    return result;
}

EXPORT CUresult cuEventSynchronize(double *event)
{
    return event != NULL ? work(0) : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuEventElapsedTime(float *milliseconds, const double *start, const double *end)
{
    *milliseconds = (float)(*end - *start);
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
