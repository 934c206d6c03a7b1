/* A libcuda that keeps what it is given and computes the one kernel of calls_program.py on the processor, so that the
 * calls' arguments are tested. FAULT=cuLaunchKernel:700 makes that call fail; FAULT=result:3 spoils a result. MODE is the
 * compute mode. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int initialized, current = -1, loaded;

static int fault(const char *call)
{
    const char *wanted = getenv("FAULT");
    size_t length = strlen(call);

    return wanted != NULL && strncmp(wanted, call, length) == 0 && wanted[length] == ':' ? atoi(wanted + length + 1) : 0;
}

#define CALL(name, ...) int name(__VA_ARGS__) { int broken = fault(#name); if (broken) return broken;
CALL(cuDriverGetVersion, int *version) *version = 12040; return 0; }
CALL(cuInit, unsigned int flags) initialized = flags == 0; return !initialized; }
CALL(cuDeviceGetCount, int *count) *count = 2; return initialized ? 0 : 3; }
CALL(cuDeviceGet, int *device, int ordinal) *device = ordinal + 10; return ordinal < 0 || ordinal > 1; }
CALL(cuDeviceGetUuid_v2, unsigned char *uuid, int device) memset(uuid, device, 16); return 0; }
CALL(cuDeviceGetAttribute, int *value, int attribute, int device)
    *value = attribute == 20 && getenv("MODE") != NULL ? atoi(getenv("MODE")) : 0; return device < 10; }
CALL(cuDevicePrimaryCtxRetain, void **context, int device) *context = (void *)(uintptr_t)(device + 100); return 0; }
CALL(cuCtxSetCurrent, void *context) current = (int)(uintptr_t)context; return current < 110; }
CALL(cuModuleLoadData, void **module, const char *text)
    loaded = strstr(text, ".visible .entry gpuprov_scale(") != NULL;
    *module = (void *)0x1000;
    return loaded ? 0 : 218;
}
CALL(cuModuleGetFunction, void **function, void *module, const char *name)
    *function = (void *)0x2000;
    return module == (void *)0x1000 && strcmp(name, "gpuprov_scale") == 0 ? 0 : 500;
}
CALL(cuMemAlloc_v2, uint64_t *place, size_t size) *place = (uint64_t)(uintptr_t)calloc(1, size); return 0; }
CALL(cuMemFree_v2, uint64_t place) free((void *)(uintptr_t)place); return 0; }
CALL(cuMemcpyHtoD_v2, uint64_t to, const void *from, size_t size)
    memcpy((void *)(uintptr_t)to, from, size); return 0; }
CALL(cuMemcpyDtoH_v2, void *to, uint64_t from, size_t size) memcpy(to, (void *)(uintptr_t)from, size); return 0; }
CALL(cuCtxSynchronize, void) return 0; }
CALL(cuLaunchKernel, void *function, unsigned int x, unsigned int y, unsigned int z, unsigned int threads,
     unsigned int threads_y, unsigned int threads_z, unsigned int shared, void *stream, void **arguments, void **extra)
    uint32_t *numbers = (uint32_t *)(uintptr_t)*(uint64_t *)arguments[0], count = *(uint32_t *)arguments[1];

    if (function != (void *)0x2000 || y * z * threads_y * threads_z != 1 || shared || stream || extra)
        return 1;
    for (uint32_t i = 0; i < x * threads && i < count; i++)
        numbers[i] = numbers[i] * 3 + i;
    for (int i = 0; i < fault("result"); i++)
        numbers[i * 7]++;
    return 0;
}
int cuGetErrorName(int result, const char **name)
{
    *name = result == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : NULL;
    return 0;
}
