/* An NVML good enough for the genuine nvidia-smi, for pynvml and for whoever discovers devices through it.
 *
 * Every function that nvml.h declares is exported; those not written here are generated as weak functions that return
 * NVML_ERROR_NOT_SUPPORTED, which is what the real library says for hardware that lacks a feature. */
#include "nvml_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>


const struct simgpu *nvml_gpus[SIMGPU_MAX];
int nvml_gpu_count = -1;

nvmlReturn_t nvml_copy_text(char *target, unsigned int size, const char *text)
{
    if (target == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) >= size)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(target, text);
    return NVML_SUCCESS;
}

static struct simgpu_mig mig_devices[SIMGPU_MAX][SIMGPU_MIG_MAX];
static int mig_counts[SIMGPU_MAX];

const struct simgpu_mig *nvml_mig(nvmlDevice_t device)
{
    for (int i = 0; i < nvml_gpu_count; i++)
        for (int j = 0; j < mig_counts[i]; j++)
            if ((const void *)device == (const void *)&mig_devices[i][j])
                return &mig_devices[i][j];
    return NULL;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig)
{
    GET_ROW(gpu, device, mig);
    for (int i = 0; i < nvml_gpu_count; i++)
        if (nvml_gpus[i] == gpu && index < (unsigned int)mig_counts[i]) {
            *mig = (nvmlDevice_t)(void *)&mig_devices[i][index];
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

/* A MIG device answers for its GPU where it has nothing of its own. */
const struct simgpu *nvml_row(nvmlDevice_t device)
{
    const struct simgpu_mig *mig = nvml_mig(device);

    if (mig != NULL)
        return mig->gpu;
    for (int i = 0; i < nvml_gpu_count; i++)
        if ((const void *)device == (const void *)nvml_gpus[i])
            return nvml_gpus[i];
    return NULL;
}

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
    nvml_gpu_count = simgpu_visible(nvml_gpus);
    for (int i = 0; i < nvml_gpu_count; i++)
        mig_counts[i] = simgpu_mig_devices(nvml_gpus[i], mig_devices[i]);
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
    if (nvml_gpu_count < 0)
        return NVML_ERROR_UNINITIALIZED;
    nvml_gpu_count = -1;
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
 * needed for `nvidia-smi -i BUSID`, three for the lists of processes; what they do was seen from what nvidia-smi 550
 * does with their answers. */
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
    if (nvml_gpu_count < 0 || index >= (unsigned int)nvml_gpu_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *domain = *slot = 0;
    *bus = nvml_gpus[index]->bus;
    return NVML_SUCCESS;
}

static nvmlReturn_t private_bus_id(unsigned int index, char *text, unsigned int size)
{
    if (nvml_gpu_count < 0 || index >= (unsigned int)nvml_gpu_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    snprintf(text, size, "00000000:%02X:00.0", nvml_gpus[index]->bus);
    return NVML_SUCCESS;
}

/* Compute, graphics and MPS processes of a GPU: none, ever. */
static nvmlReturn_t private_processes(nvmlDevice_t device, unsigned int *count, void *infos)
{
    (void)infos;
    *count = 0;
    return nvml_row(device) != NULL ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

__attribute__((visibility("default"))) nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *uuid);

nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *uuid)
{
    static const unsigned char answering[4] = {0xc4, 0xfe, 0x3e, 0x6c};
    static union {
        size_t size;
        void (*function)(void);
    } refusing[512], functions[512];

    for (size_t i = 1; i < 512; i++)
        refusing[i].function = functions[i].function = (void (*)(void))private_function;
    refusing[0].size = functions[0].size = sizeof refusing;
    functions[0x60 / 8].function = (void (*)(void))private_parse_bus_id;
    functions[0x258 / 8].function = (void (*)(void))private_location;
    functions[0x288 / 8].function = (void (*)(void))private_bus_id;
    for (size_t offset = 0x6a8; offset <= 0x6b8; offset += 8)
        functions[offset / 8].function = (void (*)(void))private_processes;
    *table = memcmp(uuid, answering, sizeof answering) == 0 ? functions : refusing;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    return nvml_copy_text(version, length, simgpu_driver_version());
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    char text[96];

    /* NVML's own version leads with that of CUDA: 12.550.163.01. */
    snprintf(text, sizeof text, "%d.%s", simgpu_cuda_version() / 1000, simgpu_driver_version());
    return nvml_copy_text(version, length, text);
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
    if (nvml_gpu_count < 0)
        return NVML_ERROR_UNINITIALIZED;
    if (count == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = (unsigned int)nvml_gpu_count;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *count) { return nvmlDeviceGetCount_v2(count); }

static nvmlReturn_t hand_out(const struct simgpu *gpu, nvmlDevice_t *device)
{
    unsigned int lost = 0;

    if (gpu == NULL)
        return NVML_ERROR_NOT_FOUND;
    if (nvml_number(gpu, "lost", &lost) == NVML_SUCCESS && lost)
        return NVML_ERROR_GPU_IS_LOST;
    *device = (nvmlDevice_t)(const void *)gpu;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    if (nvml_gpu_count < 0)
        return NVML_ERROR_UNINITIALIZED;
    if (device == NULL || index >= (unsigned int)nvml_gpu_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    return hand_out(nvml_gpus[index], device);
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    const struct simgpu *found = NULL;

    if (nvml_gpu_count < 0)
        return NVML_ERROR_UNINITIALIZED;
    if (uuid == NULL || device == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (int i = 0; i < nvml_gpu_count; i++)
        if (strcmp(nvml_gpus[i]->uuid, uuid) == 0)
            found = nvml_gpus[i];
    return hand_out(found, device);
}

nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
    const struct simgpu *found = NULL;

    if (nvml_gpu_count < 0)
        return NVML_ERROR_UNINITIALIZED;
    if (serial == NULL || device == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (int i = 0; i < nvml_gpu_count; i++)
        if (strcmp(nvml_gpus[i]->serial, serial) == 0)
            found = nvml_gpus[i];
    return hand_out(found, device);
}

/* People write 1B:00.0, 0000:1B:00.0 and 00000000:1B:00.0, in either case; domain and device are always 0 here. */
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *text, nvmlDevice_t *device)
{
    const struct simgpu *found = NULL;
    unsigned int domain = 0, bus = 0, slot = 0;

    if (nvml_gpu_count < 0)
        return NVML_ERROR_UNINITIALIZED;
    if (text == NULL || device == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3) {
        domain = 0;
        if (sscanf(text, "%x:%x", &bus, &slot) != 2)
            return NVML_ERROR_INVALID_ARGUMENT;
    }
    for (int i = 0; i < nvml_gpu_count; i++)
        if (domain == 0 && slot == 0 && nvml_gpus[i]->bus == bus)
            found = nvml_gpus[i];
    return hand_out(found, device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *text, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByPciBusId_v2(text, device);
}
