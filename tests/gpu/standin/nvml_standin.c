/* A stand-in for libnvidia-ml.so.1, for machines without an NVIDIA GPU.
 *
 *   cc -shared -fPIC -O1 -Wl,-soname,libnvidia-ml.so.1 -o DIR/libnvidia-ml.so.1 \
 *      nvml_standin.c script.c -lm -lpthread
 *   LD_LIBRARY_PATH=DIR LTUI_NVML_SCRIPT=FILE program
 *
 * Programs load it as they load the real library. What it shows stands in the text file that
 * LTUI_NVML_SCRIPT names; the file is read again whenever it changes (replace it by rename), so a
 * test can steer what happens. Without the variable, nvmlInit says DRIVER_NOT_LOADED. A script with
 * a mistake is refused on standard error: nvmlInit then says UNKNOWN, a running process keeps what
 * it had. A reading that the script does not give is refused as NOT_SUPPORTED, never zero.
 *
 * Lines, one thing each; # begins a comment; "words in quotes" may hold spaces:
 *
 *   driver VERSION                     default 575.57.08
 *   init ERROR                         nvmlInit fails: DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH, ...
 *   start UNIX_SECONDS                 when the script's time is 0; default: when the process first
 *                                      calls nvmlInit
 *   gpus COUNT MODEL                   appends GPUs of h100, a100, rtx4090, t4, or bare (no readings)
 *   slice GPU NUMBER GI CI PROFILE BYTES   a MIG slice (at most 7); it is then GPU/NUMBER as a target
 *   set GPUS READING VALUE [READING VALUE ...]
 *   process GPUS PID BYTES [graphics]  PID `self` is the asking process; BYTES -1: not told
 *   xid GPUS CODE [at T]               an XID error at time T, or as soon as the line is read;
 *                                      told to event sets that listened before it
 *   fail GPUS CALL ERROR [from T] [until T]
 *   hang GPUS CALL SECONDS|forever [from T] [until T]
 *                                      every matching call blocks so long, or until the line is gone
 *                                      or its time is over
 *   lost GPUS [from T] [until T]       off the bus: every call says GPU_IS_LOST
 *
 *   GPUS     3   0-3   0,2,5   *   0/1 (slice 1 of GPU 0); and `-` in fail and hang, for calls that
 *            name no GPU (EventSetWait, DeviceGetCount)
 *   CALL     an NVML function without `nvml` and without a version: DeviceGetPowerUsage; `*` for all
 *   READING  name, uuid, or one of KEYS in script.h. Units: power W, temp C, clocks MHz, mem_* bytes,
 *            pcie_tx/rx KB/s, nvlink_tx/rx KiB counted since ever, *_activity, sm_occupancy, util,
 *            mem_util, fan percent; gpm 1: the GPU offers GPM; throttle: NVML's mask;
 *            capability 9.0; temp_margin degrees left, tlimit_slowdown the margin at slowdown
 *   VALUE    97                 a number (0x40 too)
 *            0:10,30:97         time:value, straight lines between
 *            0@0,20@0x40        time@value, steps
 *            +4e6               grows by that much a second
 *            ~60,30,20          60 + 30 sin(2 pi t / 20)
 *            !NO_PERMISSION     refused with this error
 *            none               refused as NOT_SUPPORTED
 */

#define _GNU_SOURCE
#include "script.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum {
  OK = 0,
  UNINITIALIZED = 1,
  INVALID_ARGUMENT = 2,
  NOT_SUPPORTED = 3,
  NOT_FOUND = 6,
  INSUFFICIENT_SIZE = 7,
  DRIVER_NOT_LOADED = 9,
  TIMEOUT = 10,
  GPU_IS_LOST = 15,
  UNKNOWN = 999
};

#define API __attribute__((visibility("default")))
#define XID_EVENT 0x8ull
#define NO_INSTANCE 0xFFFFFFFFu
#define ALL_LINKS 0xFFFFFFFFu
#define POLL_MS 10

/* A device handle is the address of one of these; they stay put while scripts change. */
struct handle {
  int gpu, slot;
};
static struct handle handles[MAX_GPUS][SLOTS];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct script *script;
static struct stat read_stat;
static int users;
static double zero = -1; /* unix time of the script's zero */

static double unix_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static double script_now(void) {
  return unix_now() - (script && script->start >= 0 ? script->start : zero);
}

static void sleep_ms(double milliseconds) {
  struct timespec span = {(time_t)(milliseconds / 1e3), 0};
  span.tv_nsec = (long)((milliseconds - 1e3 * (double)span.tv_sec) * 1e6);
  nanosleep(&span, NULL);
}

/* Reads the script again if its file changed; keeps the one it has if the new one is wrong. */
static int refresh(void) {
  const char *path = getenv("LTUI_NVML_SCRIPT");
  struct stat now;
  if (!path || stat(path, &now)) return script ? OK : DRIVER_NOT_LOADED;
  if (script && now.st_ino == read_stat.st_ino && now.st_size == read_stat.st_size &&
      now.st_mtim.tv_sec == read_stat.st_mtim.tv_sec &&
      now.st_mtim.tv_nsec == read_stat.st_mtim.tv_nsec)
    return OK;
  struct script *fresh = script_read(path);
  read_stat = now;
  if (!fresh) return script ? OK : UNKNOWN;
  script_free(script);
  script = fresh;
  return OK;
}

/* -- the door that every call goes through ------------------------------------------------------ */

static const struct rule *find_rule(enum rule_kind kind, int gpu, int slot, const char *call) {
  double t = script_now();
  for (int i = 0; i < script->rule_count; i++) {
    const struct rule *rule = &script->rules[i];
    if (rule->kind == kind && rule->gpu == gpu && (gpu == NO_DEVICE || rule->slot == slot) &&
        (!strcmp(rule->call, "*") || !strcmp(rule->call, call)) && t >= rule->from &&
        t < rule->until)
      return rule;
  }
  return NULL;
}

/* Blocks while a `hang` line says so. The lock is free meanwhile, as other calls may go on. */
static void hang(int gpu, int slot, const char *call) {
  double began = unix_now();
  for (;;) {
    const struct rule *rule = find_rule(HANG, gpu, slot, call);
    if (!rule) return;
    double left = rule->seconds < 0 ? 1 : rule->seconds - (unix_now() - began);
    if (left <= 0) return;
    pthread_mutex_unlock(&lock);
    sleep_ms(left * 1e3 < POLL_MS ? left * 1e3 : POLL_MS);
    pthread_mutex_lock(&lock);
    refresh();
  }
}

static int gpu_lost(int gpu) {
  return gpu >= script->gpu_count || find_rule(LOST, gpu, 0, "*") != NULL;
}

/* Takes the lock; with OK the caller holds it and must `leave`. */
static int enter(void *handle, const char *call, struct device **device) {
  pthread_mutex_lock(&lock);
  int gpu = NO_DEVICE, slot = 0, result = users > 0 ? refresh() : UNINITIALIZED;
  if (result == OK && device) {
    struct handle *place = handle;
    if (place < &handles[0][0] || place > &handles[MAX_GPUS - 1][SLOTS - 1]) {
      result = INVALID_ARGUMENT;
    } else {
      gpu = place->gpu;
      slot = place->slot;
    }
  }
  if (result == OK) {
    hang(gpu, slot, call);
    const struct rule *rule = find_rule(FAIL, gpu, slot, call);
    if (device) *device = &script->devices[gpu][slot];
    if (device && (gpu_lost(gpu) || !(*device)->present))
      result = GPU_IS_LOST;
    else if (rule)
      result = rule->error;
  }
  if (result != OK) pthread_mutex_unlock(&lock);
  return result;
}

static int leave(int result) {
  pthread_mutex_unlock(&lock);
  return result;
}

static int reading(const struct device *device, enum key key, double *result) {
  return value_at(&device->values[key], script_now(), result);
}

static int unsigned_reading(void *handle, const char *call, enum key key, double unit,
                            unsigned *result) {
  struct device *device;
  double value = 0;
  int code = enter(handle, call, &device);
  if (code != OK) return code;
  code = reading(device, key, &value);
  if (code == OK) *result = (unsigned)(value * unit + 0.5);
  return leave(code);
}

static int has_slices(int gpu) {
  for (int slot = 1; slot < SLOTS; slot++)
    if (script->devices[gpu][slot].present) return 1;
  return 0;
}

static int copy_text(const char *text, char *buffer, unsigned length) {
  if (strlen(text) >= length) return INSUFFICIENT_SIZE;
  strcpy(buffer, text);
  return OK;
}

/* -- the library ------------------------------------------------------------------------------- */

API int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  pthread_mutex_lock(&lock);
  for (int g = 0; g < MAX_GPUS; g++)
    for (int s = 0; s < SLOTS; s++) handles[g][s] = (struct handle){g, s};
  if (zero < 0) zero = unix_now();
  int result = refresh();
  if (result == OK) {
    hang(NO_DEVICE, 0, "Init");
    result = script->init_error;
  }
  if (result == OK) users++;
  return leave(result);
}

API int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API int nvmlInit(void) { return nvmlInitWithFlags(0); }

API int nvmlShutdown(void) {
  pthread_mutex_lock(&lock);
  int result = users > 0 ? OK : UNINITIALIZED;
  if (users > 0) users--;
  return leave(result);
}

API const char *nvmlErrorString(int code) { return error_name(code); }

API int nvmlSystemGetDriverVersion(char *version, unsigned length) {
  int code = enter(NULL, "SystemGetDriverVersion", NULL);
  return code ? code : leave(copy_text(script->driver, version, length));
}

API int nvmlSystemGetNVMLVersion(char *version, unsigned length) {
  int code = enter(NULL, "SystemGetNVMLVersion", NULL);
  return code ? code : leave(copy_text(script->driver, version, length));
}

API int nvmlDeviceGetCount_v2(unsigned *count) {
  int code = enter(NULL, "DeviceGetCount", NULL);
  if (code) return code;
  *count = (unsigned)script->gpu_count;
  return leave(OK);
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  struct device *device;
  if (index >= MAX_GPUS) return INVALID_ARGUMENT;
  pthread_mutex_lock(&lock);
  int unknown = script && (int)index >= script->gpu_count;
  pthread_mutex_unlock(&lock);
  if (unknown) return INVALID_ARGUMENT;
  int code = enter(&handles[index][0], "DeviceGetHandleByIndex", &device);
  if (code) return code;
  *handle = &handles[index][0];
  return leave(OK);
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  int code = enter(NULL, "DeviceGetHandleByUUID", NULL);
  if (code) return code;
  for (int g = 0; g < script->gpu_count; g++)
    for (int s = 0; s < SLOTS; s++)
      if (script->devices[g][s].present && !strcmp(script->devices[g][s].uuid, uuid)) {
        *handle = &handles[g][s];
        return leave(gpu_lost(g) ? GPU_IS_LOST : OK);
      }
  return leave(NOT_FOUND);
}

/* -- what a GPU is ----------------------------------------------------------------------------- */

API int nvmlDeviceGetName(void *handle, char *name, unsigned length) {
  struct device *device;
  int code = enter(handle, "DeviceGetName", &device);
  return code ? code : leave(copy_text(device->name, name, length));
}

API int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) {
  struct device *device;
  int code = enter(handle, "DeviceGetUUID", &device);
  return code ? code : leave(copy_text(device->uuid, uuid, length));
}

API int nvmlDeviceGetIndex(void *handle, unsigned *index) {
  struct device *device;
  int code = enter(handle, "DeviceGetIndex", &device);
  if (code) return code;
  *index = (unsigned)((struct handle *)handle)->gpu;
  return leave(OK);
}

API int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
  struct device *device;
  double value = 0;
  int code = enter(handle, "DeviceGetCudaComputeCapability", &device);
  if (code) return code;
  code = reading(device, K_capability, &value);
  *major = (int)value;
  *minor = (int)(value * 10 + 0.5) % 10;
  return leave(code);
}

struct pci_info {
  char bus_id_legacy[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char bus_id[32];
};

API int nvmlDeviceGetPciInfo_v3(void *handle, struct pci_info *info) {
  struct device *device;
  int code = enter(handle, "DeviceGetPciInfo", &device);
  if (code) return code;
  memset(info, 0, sizeof *info);
  info->bus = 0x10u + (unsigned)((struct handle *)handle)->gpu;
  snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", info->bus);
  snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "0000:%02X:00.0", info->bus);
  return leave(OK);
}

/* -- load, memory, power, heat, clocks ---------------------------------------------------------- */

struct utilisation {
  unsigned gpu, memory;
};

API int nvmlDeviceGetUtilizationRates(void *handle, struct utilisation *result) {
  struct device *device;
  double gpu = 0, memory = 0;
  int code = enter(handle, "DeviceGetUtilizationRates", &device);
  if (code) return code;
  struct handle *place = handle;
  if (place->slot || has_slices(place->gpu)) return leave(NOT_SUPPORTED); /* as with MIG on */
  code = reading(device, K_util, &gpu);
  if (code == OK) code = reading(device, K_mem_util, &memory);
  *result = (struct utilisation){(unsigned)(gpu + 0.5), (unsigned)(memory + 0.5)};
  return leave(code);
}

struct memory_v2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};

static int memory_info(void *handle, struct memory_v2 *result) {
  struct device *device;
  double total = 0, used = 0, reserved = 0;
  int code = enter(handle, "DeviceGetMemoryInfo", &device);
  if (code) return code;
  code = reading(device, K_mem_total, &total);
  if (code == OK) code = reading(device, K_mem_used, &used);
  if (reading(device, K_mem_reserved, &reserved)) reserved = 0;
  result->total = (unsigned long long)total;
  result->used = (unsigned long long)used;
  result->reserved = (unsigned long long)reserved;
  result->free = total > used + reserved ? (unsigned long long)(total - used - reserved) : 0;
  return leave(code);
}

API int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *result) {
  return memory_info(handle, result);
}

/* The first version counts what the driver keeps for itself as used. */
API int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long result[3]) {
  struct memory_v2 memory = {0};
  int code = memory_info(handle, &memory);
  result[0] = memory.total;
  result[1] = memory.free;
  result[2] = memory.used + memory.reserved;
  return code;
}

API int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
  return unsigned_reading(handle, "DeviceGetPowerUsage", K_power, 1e3, milliwatts);
}

API int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *milliwatts) {
  return unsigned_reading(handle, "DeviceGetEnforcedPowerLimit", K_power_limit, 1e3, milliwatts);
}

API int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *degrees) {
  if (sensor != 0) return INVALID_ARGUMENT;
  return unsigned_reading(handle, "DeviceGetTemperature", K_temp, 1, degrees);
}

struct temperature_v1 {
  unsigned version;
  int sensor, degrees;
};

API int nvmlDeviceGetTemperatureV(void *handle, struct temperature_v1 *result) {
  unsigned degrees = 0;
  int code = nvmlDeviceGetTemperature(handle, result->sensor, &degrees);
  result->degrees = (int)degrees;
  return code;
}

API int nvmlDeviceGetTemperatureThreshold(void *handle, int which, unsigned *degrees) {
  if (which != 0 && which != 1) return NOT_SUPPORTED;
  return unsigned_reading(handle, "DeviceGetTemperatureThreshold",
                          which ? K_temp_slowdown : K_temp_shutdown, 1, degrees);
}

struct margin_v1 {
  unsigned version;
  int margin;
};

API int nvmlDeviceGetMarginTemperature(void *handle, struct margin_v1 *result) {
  struct device *device;
  double value = 0;
  int code = enter(handle, "DeviceGetMarginTemperature", &device);
  if (code) return code;
  code = reading(device, K_temp_margin, &value);
  result->margin = (int)value;
  return leave(code);
}

API int nvmlDeviceGetClockInfo(void *handle, int which, unsigned *mhz) {
  enum key key = which == 2 ? K_mem_clock : K_sm_clock;
  return unsigned_reading(handle, "DeviceGetClockInfo", key, 1, mhz);
}

API int nvmlDeviceGetMaxClockInfo(void *handle, int which, unsigned *mhz) {
  enum key key = which == 2 ? K_mem_clock : K_sm_clock_max;
  return unsigned_reading(handle, "DeviceGetMaxClockInfo", key, 1, mhz);
}

static int clock_reasons(void *handle, unsigned long long *mask) {
  struct device *device;
  double value = 0;
  int code = enter(handle, "DeviceGetCurrentClocksEventReasons", &device);
  if (code) return code;
  code = reading(device, K_throttle, &value);
  *mask = (unsigned long long)value;
  return leave(code);
}

API int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *mask) {
  return clock_reasons(handle, mask);
}

API int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *mask) {
  return clock_reasons(handle, mask);
}

API int nvmlDeviceGetFanSpeed(void *handle, unsigned *percent) {
  return unsigned_reading(handle, "DeviceGetFanSpeed", K_fan, 1, percent);
}

API int nvmlDeviceGetPerformanceState(void *handle, unsigned *state) {
  return unsigned_reading(handle, "DeviceGetPerformanceState", K_pstate, 1, state);
}

/* -- links ------------------------------------------------------------------------------------- */

API int nvmlDeviceGetCurrPcieLinkGeneration(void *handle, unsigned *generation) {
  return unsigned_reading(handle, "DeviceGetCurrPcieLinkGeneration", K_pcie_gen, 1, generation);
}

API int nvmlDeviceGetMaxPcieLinkGeneration(void *handle, unsigned *generation) {
  return unsigned_reading(handle, "DeviceGetMaxPcieLinkGeneration", K_pcie_gen_max, 1, generation);
}

API int nvmlDeviceGetCurrPcieLinkWidth(void *handle, unsigned *lanes) {
  return unsigned_reading(handle, "DeviceGetCurrPcieLinkWidth", K_pcie_width, 1, lanes);
}

API int nvmlDeviceGetMaxPcieLinkWidth(void *handle, unsigned *lanes) {
  return unsigned_reading(handle, "DeviceGetMaxPcieLinkWidth", K_pcie_width_max, 1, lanes);
}

/* The real call measures for 20 ms before it answers. */
API int nvmlDeviceGetPcieThroughput(void *handle, int which, unsigned *kb_per_s) {
  int code = unsigned_reading(handle, "DeviceGetPcieThroughput", which ? K_pcie_rx : K_pcie_tx, 1,
                              kb_per_s);
  if (code == OK) sleep_ms(20);
  return code;
}

API int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *active) {
  struct device *device;
  double links = 0, up = 0;
  int code = enter(handle, "DeviceGetNvLinkState", &device);
  if (code) return code;
  code = reading(device, K_nvlinks, &links);
  if (code == OK && link >= (unsigned)links) code = INVALID_ARGUMENT;
  if (reading(device, K_nvlinks_up, &up)) up = links;
  *active = link < (unsigned)up;
  return leave(code);
}

/* -- memory errors ----------------------------------------------------------------------------- */

API int nvmlDeviceGetTotalEccErrors(void *handle, int uncorrected, int ever,
                                    unsigned long long *count) {
  static const enum key KEY_OF[2][2] = {{K_ecc_corrected, K_ecc_corrected_ever},
                                        {K_ecc_uncorrected, K_ecc_uncorrected_ever}};
  struct device *device;
  double value = 0;
  int code = enter(handle, "DeviceGetTotalEccErrors", &device);
  if (code) return code;
  code = reading(device, KEY_OF[uncorrected == 1][ever == 1], &value);
  *count = (unsigned long long)value;
  return leave(code);
}

struct field_value {
  unsigned field, scope;
  int64_t timestamp_us, latency_us;
  unsigned type;
  int code;
  union {
    double real;
    unsigned number;
    unsigned long long large;
    int with_sign;
  } value;
};

enum { UNSIGNED_INT = 1, UNSIGNED_LONG_LONG = 3, SIGNED_INT = 5 };

static const struct {
  unsigned field;
  enum key key;
  unsigned type;
} FIELDS[] = {
    {29, K_retired_corrected, UNSIGNED_LONG_LONG},
    {30, K_retired_uncorrected, UNSIGNED_LONG_LONG},
    {31, K_retired_pending, UNSIGNED_LONG_LONG},
    {38, K_nvlink_crc, UNSIGNED_LONG_LONG},
    {52, K_nvlink_replay, UNSIGNED_LONG_LONG},
    {59, K_nvlink_recovery, UNSIGNED_LONG_LONG},
    {82, K_temp_mem, UNSIGNED_INT},
    {91, K_nvlinks, UNSIGNED_INT},
    {138, K_nvlink_tx, UNSIGNED_LONG_LONG},
    {139, K_nvlink_rx, UNSIGNED_LONG_LONG},
    {142, K_remapped_corrected, UNSIGNED_INT},
    {143, K_remapped_uncorrected, UNSIGNED_INT},
    {144, K_remapped_pending, UNSIGNED_INT},
    {145, K_remapped_failure, UNSIGNED_INT},
    {194, K_tlimit_slowdown, SIGNED_INT},
};

static void answer_field(const struct device *device, struct field_value *field) {
  field->code = NOT_SUPPORTED;
  field->timestamp_us = (int64_t)(unix_now() * 1e6);
  for (size_t i = 0; i < sizeof FIELDS / sizeof *FIELDS; i++) {
    double value = 0, links;
    if (FIELDS[i].field != field->field) continue;
    field->type = FIELDS[i].type;
    field->code = reading(device, FIELDS[i].key, &value);
    /* One link's share of a counter over all links. */
    if ((field->field == 138 || field->field == 139) && field->scope != ALL_LINKS)
      value = reading(device, K_nvlinks, &links) || links < 1 ? value : value / links;
    if (field->type == SIGNED_INT)
      field->value.with_sign = (int)value;
    else if (field->type == UNSIGNED_INT)
      field->value.number = (unsigned)value;
    else
      field->value.large = (unsigned long long)value;
  }
}

API int nvmlDeviceGetFieldValues(void *handle, int count, struct field_value *values) {
  struct device *device;
  int code = enter(handle, "DeviceGetFieldValues", &device);
  if (code) return code;
  for (int i = 0; i < count; i++) answer_field(device, &values[i]);
  return leave(OK);
}

/* -- processes --------------------------------------------------------------------------------- */

struct process_info {
  unsigned pid;
  unsigned long long bytes;
  unsigned gpu_instance, compute_instance;
};

static int running(void *handle, const char *call, int graphics, unsigned *count,
                   struct process_info *infos) {
  struct device *device;
  int code = enter(handle, call, &device);
  if (code) return code;
  struct handle *place = handle;
  unsigned room = infos ? *count : 0, found = 0;
  /* A GPU lists the processes of its slices too. */
  for (int slot = place->slot; slot < (place->slot ? place->slot + 1 : SLOTS); slot++) {
    const struct device *part = &script->devices[place->gpu][slot];
    for (int i = 0; part->present && i < part->process_count; i++) {
      const struct process *process = &part->processes[i];
      if (process->graphics != graphics) continue;
      if (found < room)
        infos[found] = (struct process_info){process->pid, process->bytes, part->gpu_instance,
                                             part->compute_instance};
      found++;
    }
  }
  *count = found;
  return leave(found > room ? INSUFFICIENT_SIZE : OK);
}

API int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count,
                                                struct process_info *infos) {
  return running(handle, "DeviceGetComputeRunningProcesses", 0, count, infos);
}

API int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count,
                                                 struct process_info *infos) {
  return running(handle, "DeviceGetGraphicsRunningProcesses", 1, count, infos);
}

/* -- MIG --------------------------------------------------------------------------------------- */

API int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
  struct device *device;
  double capability = 0;
  int code = enter(handle, "DeviceGetMigMode", &device);
  if (code) return code;
  if (reading(device, K_capability, &capability) || capability < 8) return leave(NOT_SUPPORTED);
  *current = *pending = (unsigned)has_slices(((struct handle *)handle)->gpu);
  return leave(OK);
}

API int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count) {
  struct device *device;
  int code = enter(handle, "DeviceGetMaxMigDeviceCount", &device);
  if (code) return code;
  *count = MAX_SLICES;
  return leave(OK);
}

API int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **slice) {
  struct device *device;
  int code = enter(handle, "DeviceGetMigDeviceHandleByIndex", &device);
  if (code) return code;
  int gpu = ((struct handle *)handle)->gpu;
  if (index >= MAX_SLICES || !script->devices[gpu][1 + index].present) return leave(NOT_FOUND);
  *slice = &handles[gpu][1 + index];
  return leave(OK);
}

API int nvmlDeviceIsMigDeviceHandle(void *handle, unsigned *is_slice) {
  struct device *device;
  int code = enter(handle, "DeviceIsMigDeviceHandle", &device);
  if (code) return code;
  *is_slice = ((struct handle *)handle)->slot > 0;
  return leave(OK);
}

API int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *slice, void **handle) {
  struct device *device;
  int code = enter(slice, "DeviceGetDeviceHandleFromMigDeviceHandle", &device);
  if (code) return code;
  *handle = &handles[((struct handle *)slice)->gpu][0];
  return leave(OK);
}

API int nvmlDeviceGetGpuInstanceId(void *handle, unsigned *id) {
  struct device *device;
  int code = enter(handle, "DeviceGetGpuInstanceId", &device);
  if (code) return code;
  *id = device->gpu_instance;
  return leave(((struct handle *)handle)->slot ? OK : NOT_SUPPORTED);
}

API int nvmlDeviceGetComputeInstanceId(void *handle, unsigned *id) {
  struct device *device;
  int code = enter(handle, "DeviceGetComputeInstanceId", &device);
  if (code) return code;
  *id = device->compute_instance;
  return leave(((struct handle *)handle)->slot ? OK : NOT_SUPPORTED);
}

/* -- GPM --------------------------------------------------------------------------------------- */

struct gpm_sample {
  int gpu, slot; /* gpu -1: not taken yet */
  double t;
};

struct gpm_metric {
  unsigned id;
  int code;
  double value;
  struct {
    const char *short_name, *long_name, *unit;
  } info;
};

struct gpm_request {
  unsigned version, count;
  struct gpm_sample *first, *second;
  struct gpm_metric metrics[];
};

struct gpm_support {
  unsigned version, supported;
};

static int offers_gpm(const struct device *device) {
  double value = 0;
  return reading(device, K_gpm, &value) == OK && value != 0;
}

API int nvmlGpmQueryDeviceSupport(void *handle, struct gpm_support *support) {
  struct device *device;
  int code = enter(handle, "GpmQueryDeviceSupport", &device);
  if (code) return code;
  support->supported = (unsigned)offers_gpm(device);
  return leave(OK);
}

API int nvmlGpmSampleAlloc(struct gpm_sample **sample) {
  *sample = calloc(1, sizeof **sample);
  (*sample)->gpu = -1;
  return OK;
}

API int nvmlGpmSampleFree(struct gpm_sample *sample) {
  free(sample);
  return OK;
}

static int take_sample(void *handle, const char *call, int slot, struct gpm_sample *sample) {
  struct device *device;
  int code = enter(handle, call, &device);
  if (code) return code;
  int gpu = ((struct handle *)handle)->gpu;
  if (!offers_gpm(&script->devices[gpu][slot])) return leave(NOT_SUPPORTED);
  *sample = (struct gpm_sample){gpu, slot, script_now()};
  return leave(OK);
}

API int nvmlGpmSampleGet(void *handle, struct gpm_sample *sample) {
  return take_sample(handle, "GpmSampleGet", 0, sample);
}

API int nvmlGpmMigSampleGet(void *handle, unsigned gpu_instance, struct gpm_sample *sample) {
  int found = 0;
  pthread_mutex_lock(&lock);
  for (int slot = 1; script && slot < SLOTS; slot++) {
    const struct device *part = &script->devices[((struct handle *)handle)->gpu][slot];
    if (part->present && part->gpu_instance == gpu_instance) found = slot;
  }
  pthread_mutex_unlock(&lock);
  return found ? take_sample(handle, "GpmMigSampleGet", found, sample) : INVALID_ARGUMENT;
}

static const struct {
  unsigned id;
  enum key key;
  double unit;
  int counter; /* the value is the counter's growth per second */
} METRICS[] = {
    {1, K_util, 1, 0},
    {2, K_sm_activity, 1, 0},
    {3, K_sm_occupancy, 1, 0},
    {5, K_tensor_activity, 1, 0},
    {7, K_tensor_activity, 1, 0},
    {10, K_dram_activity, 1, 0},
    {11, K_fp64_activity, 1, 0},
    {12, K_fp32_activity, 1, 0},
    {13, K_fp16_activity, 1, 0},
    {20, K_pcie_tx, 1e3 / 1048576, 0},
    {21, K_pcie_rx, 1e3 / 1048576, 0},
    {60, K_nvlink_rx, 1.0 / 1024, 1},
    {61, K_nvlink_tx, 1.0 / 1024, 1},
};

static void answer_metric(const struct gpm_sample *a, const struct gpm_sample *b,
                          struct gpm_metric *metric) {
  const struct device *device = &script->devices[a->gpu][a->slot];
  metric->code = NOT_SUPPORTED;
  for (size_t i = 0; i < sizeof METRICS / sizeof *METRICS; i++) {
    if (METRICS[i].id != metric->id) continue;
    const struct value *value = &device->values[METRICS[i].key];
    double before = 0, after = 0;
    metric->code = value_at(value, METRICS[i].counter ? a->t : (a->t + b->t) / 2, &before);
    if (metric->code == OK && METRICS[i].counter) metric->code = value_at(value, b->t, &after);
    metric->value = METRICS[i].unit * (METRICS[i].counter ? (after - before) / (b->t - a->t) : before);
  }
}

API int nvmlGpmMetricsGet(struct gpm_request *request) {
  struct gpm_sample *a = request->first, *b = request->second;
  int code = enter(NULL, "GpmMetricsGet", NULL);
  if (code) return code;
  if (!a || !b || a->gpu < 0 || a->gpu != b->gpu || a->slot != b->slot || b->t <= a->t)
    return leave(INVALID_ARGUMENT);
  for (unsigned i = 0; i < request->count; i++) answer_metric(a, b, &request->metrics[i]);
  return leave(OK);
}

/* -- events ------------------------------------------------------------------------------------ */

struct event_set {
  int listens[MAX_GPUS];
  struct xid *told; /* also those that came before the set listened */
  int told_count;
};

struct event {
  void *device;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
};

static int was_told(const struct event_set *set, const struct xid *xid) {
  for (int i = 0; i < set->told_count; i++) {
    const struct xid *other = &set->told[i];
    if (other->gpu == xid->gpu && other->code == xid->code && other->at == xid->at &&
        other->nth == xid->nth)
      return 1;
  }
  return 0;
}

static void remember(struct event_set *set, const struct xid *xid) {
  set->told = realloc(set->told, (size_t)(set->told_count + 1) * sizeof *xid);
  set->told[set->told_count++] = *xid;
}

static int is_due(const struct xid *xid) { return xid->at < 0 || script_now() >= xid->at; }

API int nvmlEventSetCreate(struct event_set **set) {
  int code = enter(NULL, "EventSetCreate", NULL);
  if (code) return code;
  *set = calloc(1, sizeof **set);
  return leave(OK);
}

API int nvmlEventSetFree(struct event_set *set) {
  free(set->told);
  free(set);
  return OK;
}

API int nvmlDeviceGetSupportedEventTypes(void *handle, unsigned long long *types) {
  struct device *device;
  int code = enter(handle, "DeviceGetSupportedEventTypes", &device);
  if (code) return code;
  *types = XID_EVENT;
  return leave(OK);
}

API int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, struct event_set *set) {
  struct device *device;
  int code = enter(handle, "DeviceRegisterEvents", &device);
  if (code) return code;
  if (types & ~XID_EVENT) return leave(NOT_SUPPORTED);
  int gpu = ((struct handle *)handle)->gpu;
  for (int i = 0; !set->listens[gpu] && i < script->xid_count; i++)
    if (script->xids[i].gpu == gpu && is_due(&script->xids[i])) remember(set, &script->xids[i]);
  set->listens[gpu] = 1;
  return leave(OK);
}

static int next_event(struct event_set *set, struct event *event) {
  int lost = 0;
  for (int i = 0; i < script->xid_count; i++) {
    const struct xid *xid = &script->xids[i];
    if (!set->listens[xid->gpu] || !is_due(xid) || was_told(set, xid)) continue;
    remember(set, xid);
    *event = (struct event){&handles[xid->gpu][0], XID_EVENT, xid->code, NO_INSTANCE, NO_INSTANCE};
    return OK;
  }
  for (int gpu = 0; gpu < MAX_GPUS; gpu++) lost |= set->listens[gpu] && gpu_lost(gpu);
  return lost ? GPU_IS_LOST : TIMEOUT;
}

API int nvmlEventSetWait_v2(struct event_set *set, struct event *event, unsigned timeout_ms) {
  double until = unix_now() + 1e-3 * timeout_ms;
  for (;;) {
    int code = enter(NULL, "EventSetWait", NULL);
    if (code) return code;
    code = leave(next_event(set, event));
    if (code != TIMEOUT || unix_now() >= until) return code;
    sleep_ms(POLL_MS);
  }
}

API int nvmlEventSetWait(struct event_set *set, struct event *event, unsigned timeout_ms) {
  return nvmlEventSetWait_v2(set, event, timeout_ms);
}
