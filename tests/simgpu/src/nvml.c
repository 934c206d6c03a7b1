/* An NVML good enough for the genuine nvidia-smi, for pynvml and for whoever discovers devices through it.
 *
 * Every function that nvml.h declares is exported; those not written here are generated as weak functions that return
 * NVML_ERROR_NOT_SUPPORTED, which is what the real library says for hardware that lacks a feature. */
#include "device.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#pragma GCC visibility push(default)
#include <nvml.h>

static const struct simgpu *gpus[SIMGPU_MAX];
static int gpu_count = -1; /* -1: not initialised */

static nvmlReturn_t copy_text(char *target, unsigned int size, const char *text)
{
    if (target == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) >= size)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(target, text);
    return NVML_SUCCESS;
}

/* A handle is the address of a table row; anything else came from a caller's bug. */
static const struct simgpu *row(nvmlDevice_t device)
{
    for (int i = 0; i < gpu_count; i++)
        if ((const void *)device == (const void *)gpus[i])
            return gpus[i];
    return NULL;
}

#define GET_ROW(gpu, device, out)                                                \
    const struct simgpu *gpu = row(device);                                      \
    if (gpu_count < 0)                                                           \
        return NVML_ERROR_UNINITIALIZED;                                         \
    if (gpu == NULL || (out) == NULL)                                            \
        return NVML_ERROR_INVALID_ARGUMENT

nvmlReturn_t nvmlInit_v2(void)
{
    char text[32];
    enum control control = simgpu_control();

    if (simgpu_setting("error", text, sizeof text) != NULL && atoi(text) != 0)
        return (nvmlReturn_t)atoi(text);
    if (control == CONTROL_MISSING)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    if (control == CONTROL_MISMATCH)
        return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    gpu_count = simgpu_visible(gpus);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit(void) { return nvmlInit_v2(); }

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    return nvmlInit_v2();
}

nvmlReturn_t nvmlShutdown(void)
{
    if (gpu_count < 0)
        return NVML_ERROR_UNINITIALIZED;
    gpu_count = -1;
    return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    static const char *const texts[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded",
        "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
        "Corrupted infoROM", "GPU is lost", "GPU requires reset",
        "GPU access blocked by the operating system", "Driver/library version mismatch",
        "In use by another client", "Insufficient Memory", "No data",
        "The requested vgpu operation is not available because ECC is enabled", "Insufficient Resources",
        "Frequency not supported", "Argument version mismatch", "Deprecated", "Not Ready", "GPU not found",
        "Invalid State",
    };

    return (size_t)result < sizeof texts / sizeof texts[0] ? texts[result] : "Unknown Error";
}

/* nvidia-smi asks for tables of private functions, by UUID, and ends with "Mismatch in versions" when it gets none.
 * The first word of a table is its size in bytes; a function that only refuses is good enough for most slots. Three are
 * needed for `nvidia-smi -i BUSID`; what they do was seen from what nvidia-smi 550 does with their answers. */
static nvmlReturn_t private_function(void) { return NVML_ERROR_NOT_SUPPORTED; }

static nvmlReturn_t private_parse_bus_id(const char *text, unsigned int *domain, unsigned int *bus, unsigned int *slot,
                                         unsigned int *function)
{
    *function = 0;
    if (sscanf(text, "%x:%x:%x.%x", domain, bus, slot, function) >= 3)
        return NVML_SUCCESS;
    *domain = 0;
    return sscanf(text, "%x:%x.%x", bus, slot, function) >= 2 ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

static nvmlReturn_t private_location(unsigned int index, unsigned int *domain, unsigned int *bus, unsigned int *slot)
{
    if (gpu_count < 0 || index >= (unsigned int)gpu_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *domain = *slot = 0;
    *bus = gpus[index]->bus;
    return NVML_SUCCESS;
}

static nvmlReturn_t private_bus_id(unsigned int index, char *text, unsigned int size)
{
    if (gpu_count < 0 || index >= (unsigned int)gpu_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    snprintf(text, size, "00000000:%02X:00.0", gpus[index]->bus);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *uuid);

nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *uuid)
{
    static const unsigned char with_locations[4] = {0xc4, 0xfe, 0x3e, 0x6c};
    static union {
        size_t size;
        void (*function)(void);
    } refusing[512], locating[512];

    for (size_t i = 1; i < 512; i++)
        refusing[i].function = locating[i].function = (void (*)(void))private_function;
    refusing[0].size = locating[0].size = sizeof refusing;
    locating[0x60 / 8].function = (void (*)(void))private_parse_bus_id;
    locating[0x258 / 8].function = (void (*)(void))private_location;
    locating[0x288 / 8].function = (void (*)(void))private_bus_id;
    *table = memcmp(uuid, with_locations, sizeof with_locations) == 0 ? locating : refusing;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    return copy_text(version, length, simgpu_driver_version());
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    char text[96];

    /* NVML's own version leads with that of CUDA: 12.550.163.01. */
    snprintf(text, sizeof text, "%d.%s", simgpu_cuda_version() / 1000, simgpu_driver_version());
    return copy_text(version, length, text);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    if (version == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *version = simgpu_cuda_version();
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    if (gpu_count < 0)
        return NVML_ERROR_UNINITIALIZED;
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = (unsigned int)gpu_count;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *count) { return nvmlDeviceGetCount_v2(count); }

static nvmlReturn_t hand_out(const struct simgpu *gpu, nvmlDevice_t *device)
{
    if (gpu == NULL)
        return NVML_ERROR_NOT_FOUND;
    *device = (nvmlDevice_t)(const void *)gpu;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    if (gpu_count < 0)
        return NVML_ERROR_UNINITIALIZED;
    if (device == NULL || index >= (unsigned int)gpu_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    return hand_out(gpus[index], device);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    const struct simgpu *found = NULL;

    if (gpu_count < 0)
        return NVML_ERROR_UNINITIALIZED;
    if (uuid == NULL || device == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (int i = 0; i < gpu_count; i++)
        if (strcmp(gpus[i]->uuid, uuid) == 0)
            found = gpus[i];
    return hand_out(found, device);
}

nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
    const struct simgpu *found = NULL;

    if (gpu_count < 0)
        return NVML_ERROR_UNINITIALIZED;
    if (serial == NULL || device == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (int i = 0; i < gpu_count; i++)
        if (strcmp(gpus[i]->serial, serial) == 0)
            found = gpus[i];
    return hand_out(found, device);
}

/* People write 1B:00.0, 0000:1B:00.0 and 00000000:1B:00.0, in either case; domain and device are always 0 here. */
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *text, nvmlDevice_t *device)
{
    const struct simgpu *found = NULL;
    unsigned int domain = 0, bus = 0, slot = 0;

    if (gpu_count < 0)
        return NVML_ERROR_UNINITIALIZED;
    if (text == NULL || device == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3) {
        domain = 0;
        if (sscanf(text, "%x:%x", &bus, &slot) != 2)
            return NVML_ERROR_INVALID_ARGUMENT;
    }
    for (int i = 0; i < gpu_count; i++)
        if (domain == 0 && slot == 0 && gpus[i]->bus == bus)
            found = gpus[i];
    return hand_out(found, device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *text, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByPciBusId_v2(text, device);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    GET_ROW(gpu, device, name);
    return copy_text(name, length, gpu->name);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    GET_ROW(gpu, device, uuid);
    return copy_text(uuid, length, gpu->uuid);
}

nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length)
{
    GET_ROW(gpu, device, serial);
    return copy_text(serial, length, gpu->serial);
}

nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *version, unsigned int length)
{
    GET_ROW(gpu, device, version);
    return copy_text(version, length, gpu->vbios);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    GET_ROW(gpu, device, index);
    *index = 0;
    while (gpus[*index] != gpu)
        ++*index;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *number)
{
    GET_ROW(gpu, device, number);
    *number = (unsigned int)gpu->minor;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, nvmlBrandType_t *brand)
{
    GET_ROW(gpu, device, brand);
    *brand = NVML_BRAND_NVIDIA;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, nvmlDeviceArchitecture_t *architecture)
{
    GET_ROW(gpu, device, architecture);
    *architecture = NVML_DEVICE_ARCH_HOPPER;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    GET_ROW(gpu, device, major);
    *major = 9;
    *minor = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    GET_ROW(gpu, device, pci);
    memset(pci, 0, sizeof *pci);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "0000:%02X:00.0", gpu->bus);
    snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", gpu->bus);
    pci->bus = gpu->bus;
    pci->pciDeviceId = gpu->pci_device_id;
    pci->pciSubSystemId = gpu->pci_subsystem_id;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    return nvmlDeviceGetPciInfo_v3(device, pci);
}

nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    return nvmlDeviceGetPciInfo_v3(device, pci);
}

nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_t *pci)
{
    GET_ROW(gpu, device, pci);
    pci->domain = 0;
    pci->bus = gpu->bus;
    pci->device = 0;
    pci->pciDeviceId = gpu->pci_device_id;
    pci->pciSubSystemId = gpu->pci_subsystem_id;
    pci->baseClass = 0x03;
    pci->subClass = 0x02;
    snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", gpu->bus);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    GET_ROW(gpu, device, memory);
    memory->total = simgpu_memory_mib(gpu) << 20;
    memory->used = 0;
    memory->free = memory->total;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    GET_ROW(gpu, device, memory);
    memory->total = simgpu_memory_mib(gpu) << 20;
    memory->reserved = 0;
    memory->used = 0;
    memory->free = memory->total;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *celsius)
{
    GET_ROW(gpu, device, celsius);
    if (sensor != NVML_TEMPERATURE_GPU)
        return NVML_ERROR_INVALID_ARGUMENT;
    *celsius = 30 + (unsigned int)gpu->minor;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts)
{
    GET_ROW(gpu, device, milliwatts);
    *milliwatts = 70000 + 1000 * (unsigned int)gpu->minor;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *milliwatts)
{
    GET_ROW(gpu, device, milliwatts);
    *milliwatts = 700000;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    GET_ROW(gpu, device, utilization);
    utilization->gpu = 0;
    utilization->memory = 0;
    return NVML_SUCCESS;
}

/* The real flag lives in the kernel module; here a file of the machine stands for it. */
static void persistence_path(const struct simgpu *gpu, char *path, size_t size)
{
    snprintf(path, size, "/run/simgpu/persistence-%d", gpu->minor);
}

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    char path[64];

    GET_ROW(gpu, device, mode);
    persistence_path(gpu, path, sizeof path);
    *mode = access(path, F_OK) == 0 ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
    char path[64];
    int descriptor;

    GET_ROW(gpu, device, device);
    if (geteuid() != 0)
        return NVML_ERROR_NO_PERMISSION;
    persistence_path(gpu, path, sizeof path);
    if (mode == NVML_FEATURE_DISABLED) {
        unlink(path);
        return NVML_SUCCESS;
    }
    mkdir("/run/simgpu", 0755);
    descriptor = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (descriptor < 0)
        return NVML_ERROR_UNKNOWN;
    close(descriptor);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode)
{
    GET_ROW(gpu, device, mode);
    *mode = NVML_COMPUTEMODE_DEFAULT;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, nvmlPstates_t *state)
{
    GET_ROW(gpu, device, state);
    *state = NVML_PSTATE_0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending)
{
    GET_ROW(gpu, device, current);
    *current = *pending = NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t error_type,
                                         nvmlEccCounterType_t counter, unsigned long long *errors)
{
    GET_ROW(gpu, device, errors);
    (void)error_type;
    (void)counter;
    *errors = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    GET_ROW(gpu, device, current);
    *current = *pending = simgpu_mig_enabled(gpu) ? NVML_DEVICE_MIG_ENABLE : NVML_DEVICE_MIG_DISABLE;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    GET_ROW(gpu, device, count);
    *count = 7;
    return NVML_SUCCESS;
}

/* MIG mode can be on, but nobody has created an instance yet: the state of a machine just provisioned. */
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig)
{
    GET_ROW(gpu, device, mig);
    (void)index;
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *answer)
{
    GET_ROW(gpu, device, answer);
    *answer = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, nvmlGpuVirtualizationMode_t *mode)
{
    GET_ROW(gpu, device, mode);
    *mode = NVML_GPU_VIRTUALIZATION_MODE_NONE;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDisplayActive(nvmlDevice_t device, nvmlEnableState_t *active)
{
    GET_ROW(gpu, device, active);
    *active = NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDisplayMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    return nvmlDeviceGetDisplayActive(device, mode);
}

static nvmlReturn_t no_processes(nvmlDevice_t device, unsigned int *count)
{
    GET_ROW(gpu, device, count);
    *count = 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos)
{
    (void)infos;
    return no_processes(device, count);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos)
{
    (void)infos;
    return no_processes(device, count);
}

nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                        nvmlProcessInfo_t *infos)
{
    (void)infos;
    return no_processes(device, count);
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    static int events;

    if (set == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *set = (nvmlEventSet_t)(void *)&events;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    (void)set;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    GET_ROW(gpu, device, set);
    (void)types;
    return NVML_SUCCESS;
}

/* Nothing ever happens to a simulated GPU: wait as long as the caller wants, then say so. */
nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int milliseconds)
{
    (void)set;
    (void)data;
    usleep(milliseconds * 1000u);
    return NVML_ERROR_TIMEOUT;
}
