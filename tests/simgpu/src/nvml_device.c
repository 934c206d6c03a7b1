/* What NVML tells about one GPU: constants of an idle H100, but for what differs per GPU in the table. */
#include "nvml_state.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* What the real kernel module keeps of a GPU: here a file of the machine has the number, and none is 0. */
static void state_path(const struct simgpu *gpu, const char *name, char *path, size_t size)
{
    snprintf(path, size, "/run/simgpu/%s-%d", name, gpu->minor);
}

nvmlReturn_t nvml_number(const struct simgpu *gpu, const char *name, unsigned int *number)
{
    return simgpu_number(gpu, name, number) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

static unsigned int state_of(const struct simgpu *gpu, const char *name)
{
    unsigned int value = 0;

    return nvml_number(gpu, name, &value) == NVML_SUCCESS ? value : 0;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    char text[96];

    GET_ROW(gpu, device, name);
    snprintf(text, sizeof text, "%s%s", gpu->name, nvml_mig(device) != NULL ? " MIG 3g.40gb" : "");
    return nvml_copy_text(name, length, text);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    char text[48];

    GET_ROW(gpu, device, uuid);
    snprintf(text, sizeof text, "%s", gpu->uuid);
    if (nvml_mig(device) != NULL)
        simgpu_mig_uuid(nvml_mig(device), text, sizeof text);
    return nvml_copy_text(uuid, length, text);
}

nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length)
{
    GET_ROW(gpu, device, serial);
    return nvml_copy_text(serial, length, gpu->serial);
}

nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *version, unsigned int length)
{
    GET_ROW(gpu, device, version);
    return nvml_copy_text(version, length, gpu->vbios);
}

nvmlReturn_t nvmlDeviceGetGspFirmwareVersion(nvmlDevice_t device, char *version)
{
    GET_ROW(gpu, device, version);
    return nvml_copy_text(version, NVML_GSP_FIRMWARE_VERSION_BUF_SIZE, simgpu_driver_version());
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    GET_ROW(gpu, device, index);
    *index = 0;
    while (nvml_gpus[*index] != gpu)
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
    if (state_of(gpu, "requires-reset"))
        return NVML_ERROR_RESET_REQUIRED;
    memory->total = simgpu_memory_mib(gpu) << 20;
    memory->used = (unsigned long long)state_of(gpu, "memory-used") << 20;
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    GET_ROW(gpu, device, memory);
    if (state_of(gpu, "requires-reset"))
        return NVML_ERROR_RESET_REQUIRED;
    memory->total = simgpu_memory_mib(gpu) << 20;
    memory->reserved = 0;
    memory->used = (unsigned long long)state_of(gpu, "memory-used") << 20;
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *celsius)
{
    GET_ROW(gpu, device, celsius);
    if (sensor != NVML_TEMPERATURE_GPU)
        return NVML_ERROR_INVALID_ARGUMENT;
    *celsius = 30 + (unsigned int)gpu->minor;
    (void)nvml_number(gpu, "temperature", celsius);
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
    utilization->gpu = state_of(gpu, "load");
    utilization->memory = 0;
    return NVML_SUCCESS;
}

static nvmlReturn_t set_state(const struct simgpu *gpu, const char *name, unsigned int value)
{
    char path[64];
    FILE *file;

    if (geteuid() != 0)
        return NVML_ERROR_NO_PERMISSION;
    state_path(gpu, name, path, sizeof path);
    if (value == 0) {
        unlink(path);
        return NVML_SUCCESS;
    }
    mkdir("/run/simgpu", 0755);
    file = fopen(path, "we");
    if (file == NULL)
        return NVML_ERROR_UNKNOWN;
    fprintf(file, "%u\n", value);
    fclose(file);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    GET_ROW(gpu, device, mode);
    *mode = state_of(gpu, "persistence") ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t mode)
{
    GET_ROW(gpu, device, device);
    return set_state(gpu, "persistence", mode);
}

nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode)
{
    GET_ROW(gpu, device, mode);
    *mode = (nvmlComputeMode_t)state_of(gpu, "compute-mode");
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, nvmlComputeMode_t mode)
{
    GET_ROW(gpu, device, device);
    return set_state(gpu, "compute-mode", mode);
}

/* Rows of memory that were replaced, or could not be, are told only of GPUs that have some. */
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *correctable, unsigned int *uncorrectable,
                                       unsigned int *pending, unsigned int *failed)
{
    GET_ROW(gpu, device, failed);
    *correctable = *uncorrectable = 0;
    *pending = state_of(gpu, "remap-pending");
    *failed = state_of(gpu, "remap-failed");
    *correctable = state_of(gpu, "remapped");
    return *correctable || *pending || *failed ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *info)
{
    GET_ROW(gpu, device, info);
    info->state = (nvmlGpuFabricState_t)state_of(gpu, "fabric");
    info->status = (nvmlReturn_t)state_of(gpu, "fabric-status");
    info->cliqueId = state_of(gpu, "clique");
    info->healthMask = state_of(gpu, "fabric-health");
    return info->state ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
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
    *current = *pending =
        simgpu_mig_enabled(gpu) || state_of(gpu, "mig") ? NVML_DEVICE_MIG_ENABLE : NVML_DEVICE_MIG_DISABLE;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned int mode, nvmlReturn_t *status)
{
    GET_ROW(gpu, device, status);
    *status = NVML_SUCCESS;
    return set_state(gpu, "mig", mode);
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    GET_ROW(gpu, device, count);
    *count = 7;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *answer)
{
    GET_ROW(gpu, device, answer);
    *answer = nvml_mig(device) != NULL;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device, nvmlDevice_t *parent)
{
    GET_ROW(gpu, device, parent);
    if (nvml_mig(device) == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *parent = (nvmlDevice_t)(const void *)gpu;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    GET_ROW(gpu, device, id);
    if (nvml_mig(device) == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *id = nvml_mig(device)->gpu_instance;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    GET_ROW(gpu, device, id);
    if (nvml_mig(device) == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *id = nvml_mig(device)->compute_instance;
    return NVML_SUCCESS;
}

/* A profile of 3g.40gb: three slices of both kinds. */
nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    GET_ROW(gpu, device, attributes);
    memset(attributes, 0, sizeof *attributes);
    attributes->gpuInstanceSliceCount = attributes->computeInstanceSliceCount = 3;
    attributes->multiprocessorCount = 60;
    attributes->memorySizeMB = simgpu_memory_mib(gpu) / 2;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, nvmlGpuVirtualizationMode_t *mode)
{
    GET_ROW(gpu, device, mode);
    *mode = (nvmlGpuVirtualizationMode_t)state_of(gpu, "virtualization");
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

#define NO_PROCESSES(name, type)                                                              \
    nvmlReturn_t nvmlDeviceGet##name(nvmlDevice_t device, unsigned int *count, type *infos)   \
    {                                                                                         \
        (void)infos;                                                                          \
        return no_processes(device, count);                                                   \
    }
NO_PROCESSES(ComputeRunningProcesses, nvmlProcessInfo_v1_t)
NO_PROCESSES(ComputeRunningProcesses_v2, nvmlProcessInfo_v2_t)
NO_PROCESSES(ComputeRunningProcesses_v3, nvmlProcessInfo_t)
NO_PROCESSES(GraphicsRunningProcesses, nvmlProcessInfo_v1_t)
NO_PROCESSES(GraphicsRunningProcesses_v2, nvmlProcessInfo_v2_t)
NO_PROCESSES(GraphicsRunningProcesses_v3, nvmlProcessInfo_t)
NO_PROCESSES(MPSComputeRunningProcesses, nvmlProcessInfo_v1_t)
NO_PROCESSES(MPSComputeRunningProcesses_v2, nvmlProcessInfo_v2_t)
NO_PROCESSES(MPSComputeRunningProcesses_v3, nvmlProcessInfo_t)

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
