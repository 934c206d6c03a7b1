/* Loads each library that is named and prints one line on it: its real path, and what it answers; or the loader's error.

     libcuda.so.1 /usr/lib/.../libcuda.so.550.163.01 cuInit=100 cuDriverGetVersion=0:12040
     /cudart/libcudart.so.12 /cudart/libcudart.so.12 cudaDriverGetVersion=0:12040 cudaGetDeviceCount=100
     libnvidia-ml.so.1 /usr/lib/.../libnvidia-ml.so.550.163.01 nvmlInit_v2=9 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>

static void number(void *library, const char *name)
{
    int (*call)(int *) = (int (*)(int *))dlsym(library, name);
    int value = -1;
    if (call) {
        int result = call(&value);
        printf(" %s=%d:%d", name, result, value);
    }
}

int main(int count, char **words)
{
    for (int i = 1; i < count; i++) {
        void *library = dlopen(words[i], RTLD_NOW);
        struct link_map *map = NULL;
        char path[PATH_MAX];
        if (!library || dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) {
            printf("%s error %s\n", words[i], dlerror());
            continue;
        }
        printf("%s %s", words[i], realpath(map->l_name, path) ? path : map->l_name);
        int (*cu_init)(unsigned) = (int (*)(unsigned))dlsym(library, "cuInit");
        int (*nvml_init)(void) = (int (*)(void))dlsym(library, "nvmlInit_v2");
        if (cu_init)
            printf(" cuInit=%d", cu_init(0));
        if (nvml_init)
            printf(" nvmlInit_v2=%d", nvml_init());
        number(library, "cuDriverGetVersion");
        number(library, "cuDeviceGetCount");
        number(library, "cudaDriverGetVersion");
        number(library, "cudaGetDeviceCount");
        printf("\n");
        fflush(stdout);
    }
    return 0;
}
