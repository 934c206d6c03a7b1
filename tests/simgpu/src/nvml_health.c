/* What NVML tells of a GPU's health. A file /run/simgpu/NAME-MINOR has each number; without it the GPU lacks the
 * feature, as the constants in nvml_device.c are those of a GPU of which nothing more is told. */
#include "nvml_state.h"

#include <stdio.h>
#include <string.h>

#define SMALL(function, name)                                                       \
    nvmlReturn_t nvmlDeviceGet##function(nvmlDevice_t device, unsigned int *number) \
    {                                                                               \
        GET_ROW(gpu, device, number);                                               \
        return nvml_number(gpu, name, number);                                      \
    }
SMALL(MaxPcieLinkGeneration, "pcie-max-gen")
SMALL(GpuMaxPcieLinkGeneration, "pcie-gpu-gen")
SMALL(CurrPcieLinkGeneration, "pcie-gen")
SMALL(MaxPcieLinkWidth, "pcie-max-width")
SMALL(CurrPcieLinkWidth, "pcie-width")

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *state)
{
    unsigned int active;

    GET_ROW(gpu, device, state);
    if (link >= NVML_NVLINK_MAX_LINKS)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (nvml_number(gpu, "nvlinks", &active) != NVML_SUCCESS)
        return NVML_ERROR_NOT_SUPPORTED;
    *state = link < active ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

/* These numbers are younger than the header; nvidia-smi 550 asks for all but the recovery action. */
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    static const struct {
        unsigned int field;
        const char *name;
    } fields[] = {{226, "reset-required"},
                  {227, "drain-recommended"},
                  {230, "recovery-action"},
                  {NVML_FI_DEV_MEMORY_TEMP, "memory-temperature"}};

    GET_ROW(gpu, device, values);
    for (int i = 0; i < count; i++) {
        values[i].nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
        values[i].valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
        for (size_t j = 0; j < sizeof fields / sizeof fields[0]; j++)
            if (fields[j].field == values[i].fieldId)
                values[i].nvmlReturn = nvml_number(gpu, fields[j].name, &values[i].value.uiVal);
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                             nvmlEccCounterType_t counter, nvmlMemoryLocation_t location,
                                             unsigned long long *errors)
{
    unsigned int number = 0;
    nvmlReturn_t result;

    GET_ROW(gpu, device, errors);
    if (location != NVML_MEMORY_LOCATION_DRAM && location != NVML_MEMORY_LOCATION_SRAM)
        return NVML_ERROR_NOT_SUPPORTED;
    result = nvml_number(gpu, location == NVML_MEMORY_LOCATION_DRAM ? "ecc-dram" : "ecc-sram", &number);
    *errors = type == NVML_MEMORY_ERROR_TYPE_UNCORRECTED && counter == NVML_VOLATILE_ECC ? number : 0;
    return result;
}

nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device, nvmlEccSramErrorStatus_t *status)
{
    unsigned int exceeded, volatile_errors = 0;

    GET_ROW(gpu, device, status);
    if (nvml_number(gpu, "ecc-threshold", &exceeded) != NVML_SUCCESS)
        return NVML_ERROR_NOT_SUPPORTED;
    (void)nvml_number(gpu, "ecc-sram", &volatile_errors);
    *status = (nvmlEccSramErrorStatus_t){.version = status->version,
                                         .volatileUncParity = volatile_errors,
                                         .bThresholdExceeded = exceeded};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    unsigned int mask = 0;
    nvmlReturn_t result;

    GET_ROW(gpu, device, reasons);
    result = nvml_number(gpu, "clock-reasons", &mask);
    *reasons = mask;
    return result;
}

nvmlReturn_t nvmlDeviceGetSupportedClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    GET_ROW(gpu, device, reasons);
    *reasons = ~0ull;
    return nvmlDeviceGetCurrentClocksEventReasons(device, &(unsigned long long){0});
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    return nvmlDeviceGetCurrentClocksEventReasons(device, reasons);
}

nvmlReturn_t nvmlDeviceGetSupportedClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    return nvmlDeviceGetSupportedClocksEventReasons(device, reasons);
}

nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, nvmlTemperatureThresholds_t kind,
                                               unsigned int *celsius)
{
    GET_ROW(gpu, device, celsius);
    if (kind == NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        return nvml_number(gpu, "slow-temperature", celsius);
    if (kind == NVML_TEMPERATURE_THRESHOLD_MEM_MAX)
        return nvml_number(gpu, "max-memory-temperature", celsius);
    return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, nvmlEnableState_t *pending)
{
    unsigned int number = 0;
    nvmlReturn_t result;

    GET_ROW(gpu, device, pending);
    result = nvml_number(gpu, "pages-pending", &number);
    *pending = number ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return result;
}

/* 0: without a licence, 1: with one. */
nvmlReturn_t nvmlDeviceGetGridLicensableFeatures_v4(nvmlDevice_t device, nvmlGridLicensableFeatures_t *features)
{
    unsigned int licensed = 0;

    GET_ROW(gpu, device, features);
    if (nvml_number(gpu, "licence", &licensed) != NVML_SUCCESS)
        return NVML_ERROR_NOT_SUPPORTED;
    memset(features, 0, sizeof *features);
    features->isGridLicenseSupported = 1;
    features->licensableFeaturesCount = 1;
    features->gridLicensableFeatures[0].featureCode = NVML_GRID_LICENSE_FEATURE_CODE_VGPU;
    features->gridLicensableFeatures[0].featureState = licensed;
    features->gridLicensableFeatures[0].featureEnabled = 1;
    snprintf(features->gridLicensableFeatures[0].productName, NVML_GRID_LICENSE_BUFFER_SIZE,
             "NVIDIA Virtual Compute Server");
    return NVML_SUCCESS;
}
