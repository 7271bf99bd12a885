/* A stand-in for NVIDIA's management library (libnvidia-ml.so.1): the calls that nvidia-ml-py makes for slurmft, with the
 * signatures of nvml.h, answered from a text file that is read again whenever it has changed.
 *
 * The file is $NVML_STAND_IN, else <nodename>.gpus beside this library. Without it the driver is not loaded. Lines:
 *
 *   driver init=0 version=580.65.06 xid=79:3
 *   gpu 0 uuid=GPU-... pci=00000000:1B:00.0 temp=34 links=18 down=0x4 pids=17:18 mig=2 ...
 *
 * On any line: fail=CALL:CODE+CALL:CODE (a call that gives an error), hang=CALL (one that never returns), hang_s=SECONDS
 * (it returns after so long); on a device's: lost=1, reset=1. A value that is not there is "not supported", as of a
 * device that lacks it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6, INSUFFICIENT_SIZE, DRIVER_NOT_LOADED = 9,
       TIMEOUT, GPU_IS_LOST = 15, RESET_REQUIRED };
enum { MIG_BASE = 1000 };

typedef void *Device;

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} PciInfo;

typedef struct {
    unsigned pid;
    unsigned long long usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
} ProcessInfo;

typedef struct {
    Device device;
    unsigned long long eventType, eventData;
    unsigned gpuInstanceId, computeInstanceId;
} EventData;

static char steering[1 << 16];

static void read_steering(void) {
    char path[4096];
    const char *named = getenv("NVML_STAND_IN");
    if (named) {
        snprintf(path, sizeof path, "%s", named);
    } else {
        Dl_info us;
        struct utsname host;
        char folder[2048];
        uname(&host);
        dladdr((void *)read_steering, &us);
        snprintf(folder, sizeof folder, "%s", us.dli_fname);
        char *slash = strrchr(folder, '/');
        if (slash) *slash = 0;
        snprintf(path, sizeof path, "%s/%s.gpus", slash ? folder : ".", host.nodename);
    }
    static struct stat before;
    struct stat now;
    if (stat(path, &now) == 0 && now.st_ino == before.st_ino && now.st_size == before.st_size &&
        now.st_mtim.tv_sec == before.st_mtim.tv_sec && now.st_mtim.tv_nsec == before.st_mtim.tv_nsec) return;
    FILE *file = fopen(path, "r");
    memset(&before, 0, sizeof before);
    if (file) fstat(fileno(file), &before);
    size_t length = file ? fread(steering, 1, sizeof steering - 1, file) : 0;
    if (file) fclose(file);
    steering[length] = 0;
}

/* The line that begins with these words, without its end. */
static int line_of(const char *words, char *line, size_t size) {
    size_t length = strlen(words);
    for (const char *at = steering; *at; at = strchrnul(at, '\n'), at += *at == '\n') {
        if (strncmp(at, words, length) == 0 && (at[length] == ' ' || at[length] == '\n' || !at[length])) {
            size_t until = (size_t)(strchrnul(at, '\n') - at);
            snprintf(line, size, "%.*s", (int)until, at);
            return 1;
        }
    }
    line[0] = 0;
    return 0;
}

static int value_of(const char *line, const char *key, char *value, size_t size) {
    char wanted[80];
    snprintf(wanted, sizeof wanted, " %s=", key);
    const char *at = strstr(line, wanted);
    if (!at) return 0;
    at += strlen(wanted);
    snprintf(value, size, "%.*s", (int)strcspn(at, " "), at);
    return 1;
}

static unsigned long long number(const char *line, const char *key, unsigned long long otherwise) {
    char value[64];
    return value_of(line, key, value, sizeof value) ? strtoull(value, NULL, 0) : otherwise;
}

/* What this line says of this call: an error, or nothing. A call that hangs does so here. */
static int fate(const char *line, const char *call) {
    char value[1024];
    if (value_of(line, "hang", value, sizeof value) && strcmp(value, call) == 0) {
        unsigned long long seconds = number(line, "hang_s", 0);
        if (seconds) sleep((unsigned)seconds);
        else for (;;) pause();
    }
    if (!value_of(line, "fail", value, sizeof value)) return SUCCESS;
    for (char *rest = value, *one; (one = strtok_r(rest, "+", &rest));) {
        char *colon = strchr(one, ':');
        if (colon && strlen(call) == (size_t)(colon - one) && strncmp(one, call, strlen(call)) == 0) return atoi(colon + 1);
    }
    return SUCCESS;
}

static int index_of(Device device) {
    intptr_t handle = (intptr_t)device;
    return (int)(handle >= MIG_BASE ? handle / MIG_BASE - 1 : handle - 1);
}

static int enter_driver(const char *call, char *line, size_t size) {
    read_steering();
    if (!line_of("driver", line, size)) return DRIVER_NOT_LOADED;
    return fate(line, call);
}

static int enter(Device device, const char *call, char *line, size_t size) {
    char words[32];
    int code = enter_driver(call, line, size);
    if (code) return code;
    snprintf(words, sizeof words, "gpu %d", index_of(device));
    if (!line_of(words, line, size)) return INVALID_ARGUMENT;
    if (number(line, "lost", 0)) return GPU_IS_LOST;
    if (number(line, "reset", 0)) return RESET_REQUIRED;
    return fate(line, call);
}

#define DRIVER_CALL(name) char line[4096]; int code = enter_driver(#name, line, sizeof line); if (code) return code
#define DEVICE_CALL(name) char line[4096]; int code = enter(device, #name, line, sizeof line); if (code) return code

/* One number of a device, under one key. */
#define NUMBER(name, type, key)                                                                        \
    int name(Device device, type *value) {                                                             \
        char found[64];                                                                                \
        DEVICE_CALL(name);                                                                             \
        if (!value_of(line, key, found, sizeof found)) return NOT_SUPPORTED;                           \
        *value = (type)strtoull(found, NULL, 0);                                                       \
        return SUCCESS;                                                                                \
    }

/* The same with one argument that does not matter here. */
#define NUMBER_OF(name, type, key)                                                                     \
    int name(Device device, unsigned which, type *value) {                                             \
        char found[64];                                                                                \
        (void)which;                                                                                   \
        DEVICE_CALL(name);                                                                             \
        if (!value_of(line, key, found, sizeof found)) return NOT_SUPPORTED;                           \
        *value = (type)strtoull(found, NULL, 0);                                                       \
        return SUCCESS;                                                                                \
    }

NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, "reasons")
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, "width")
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, "maxwidth")
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, "maxgen")
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, unsigned, "retired")
NUMBER(nvmlDeviceGetPowerUsage, unsigned, "power")
NUMBER(nvmlDeviceGetMaxMigDeviceCount, unsigned, "mig")
NUMBER_OF(nvmlDeviceGetTemperature, unsigned, "temp")
NUMBER_OF(nvmlDeviceGetClockInfo, unsigned, "clock")

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    DRIVER_CALL(nvmlInitWithFlags);
    return (int)number(line, "init", 0);
}

int nvmlShutdown(void) { return SUCCESS; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    DRIVER_CALL(nvmlSystemGetDriverVersion);
    return value_of(line, "version", text, size) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    char words[32], other[4096];
    DRIVER_CALL(nvmlDeviceGetCount_v2);
    for (*count = 0;; ++*count) {
        snprintf(words, sizeof words, "gpu %u", *count);
        if (!line_of(words, other, sizeof other)) return SUCCESS;
    }
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device *found) {
    Device device = (Device)(intptr_t)(index + 1);
    DEVICE_CALL(nvmlDeviceGetHandleByIndex_v2);
    *found = device;
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device device, char *text, unsigned size) {
    char uuid[128];
    DEVICE_CALL(nvmlDeviceGetUUID);
    if (!value_of(line, "uuid", uuid, sizeof uuid)) return NOT_SUPPORTED;
    if ((intptr_t)device >= MIG_BASE) snprintf(text, size, "MIG-%s-%d", uuid + 4, (int)((intptr_t)device % MIG_BASE));
    else snprintf(text, size, "%s", uuid);
    return SUCCESS;
}

int nvmlDeviceGetName(Device device, char *text, unsigned size) {
    DEVICE_CALL(nvmlDeviceGetName);
    if (!value_of(line, "name", text, size)) return NOT_SUPPORTED;
    for (char *at = text; *at; at++) if (*at == '_') *at = ' ';
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(Device device, PciInfo *info) {
    DEVICE_CALL(nvmlDeviceGetPciInfo_v3);
    memset(info, 0, sizeof *info);
    return value_of(line, "pci", info->busId, sizeof info->busId) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetTotalEccErrors(Device device, unsigned kind, unsigned counter, unsigned long long *count) {
    char found[64];
    (void)counter;
    DEVICE_CALL(nvmlDeviceGetTotalEccErrors);
    if (!value_of(line, kind ? "uncorrected" : "corrected", found, sizeof found)) return NOT_SUPPORTED;
    *count = strtoull(found, NULL, 0);
    return SUCCESS;
}

int nvmlDeviceGetRemappedRows(Device device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    char found[64];
    DEVICE_CALL(nvmlDeviceGetRemappedRows);
    if (!value_of(line, "remapped", found, sizeof found)) return NOT_SUPPORTED;
    return sscanf(found, "%u:%u:%u:%u", corrected, uncorrected, pending, failed) == 4 ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetNvLinkState(Device device, unsigned link, unsigned *active) {
    DEVICE_CALL(nvmlDeviceGetNvLinkState);
    if (link >= number(line, "links", 0)) return INVALID_ARGUMENT;
    *active = !(number(line, "down", 0) >> link & 1);
    return SUCCESS;
}

int nvmlDeviceGetNvLinkErrorCounter(Device device, unsigned link, unsigned counter, unsigned long long *count) {
    (void)counter;
    DEVICE_CALL(nvmlDeviceGetNvLinkErrorCounter);
    if (link >= number(line, "links", 0)) return INVALID_ARGUMENT;
    *count = link == 0 ? number(line, "linkerrors", 0) : 0;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device device, unsigned *count, ProcessInfo *processes) {
    char pids[512];
    unsigned room = *count, seen = 0;
    DEVICE_CALL(nvmlDeviceGetComputeRunningProcesses_v3);
    if (value_of(line, "pids", pids, sizeof pids)) {
        for (char *rest = pids, *one; (one = strtok_r(rest, ":", &rest)); seen++) {
            if (processes && seen < room) processes[seen] = (ProcessInfo){.pid = (unsigned)atoi(one), .usedGpuMemory = 1 << 30};
        }
    }
    *count = seen;
    return seen > room || (seen && !processes) ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetMigMode(Device device, unsigned *current, unsigned *pending) {
    DEVICE_CALL(nvmlDeviceGetMigMode);
    *current = *pending = number(line, "mig", 0) > 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device device, unsigned index, Device *found) {
    DEVICE_CALL(nvmlDeviceGetMigDeviceHandleByIndex);
    if (index >= number(line, "mig", 0)) return NOT_FOUND;
    *found = (Device)((intptr_t)device * MIG_BASE + (intptr_t)index);
    return SUCCESS;
}

int nvmlEventSetCreate(void **set) {
    *set = malloc(1);
    return SUCCESS;
}

int nvmlEventSetFree(void *set) {
    free(set);
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(Device device, unsigned long long kinds, void *set) {
    (void)kinds, (void)set;
    DEVICE_CALL(nvmlDeviceRegisterEvents);
    return SUCCESS;
}

/* The Xid of the driver's line, as often as it is asked for; TIMEOUT without one. */
int nvmlEventSetWait_v2(void *set, EventData *event, unsigned timeout_ms) {
    char found[64];
    unsigned xid, gpu;
    (void)set;
    DRIVER_CALL(nvmlEventSetWait_v2);
    if (!value_of(line, "xid", found, sizeof found) || sscanf(found, "%u:%u", &xid, &gpu) != 2) {
        usleep(1000 * timeout_ms);
        return TIMEOUT;
    }
    *event = (EventData){.device = (Device)(intptr_t)(gpu + 1), .eventType = 8, .eventData = xid};
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    switch (code) {
        case SUCCESS: return "The operation was successful";
        case UNINITIALIZED: return "Uninitialized";
        case INVALID_ARGUMENT: return "Invalid Argument";
        case NOT_SUPPORTED: return "Not Supported";
        case NOT_FOUND: return "Not Found";
        case DRIVER_NOT_LOADED: return "Driver Not Loaded";
        case TIMEOUT: return "Timeout";
        case GPU_IS_LOST: return "GPU is lost";
        case RESET_REQUIRED: return "GPU requires restart";
        default: return "Unknown Error";
    }
}
