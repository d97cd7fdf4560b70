/* Reads a stand-in script; the format is described in nvml_standin.c. */

#include "script.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_WORDS 64
#define NOT_SUPPORTED 3

static const struct {
  int code;
  const char *name;
} ERRORS[] = {
    {0, "SUCCESS"},
    {1, "UNINITIALIZED"},
    {2, "INVALID_ARGUMENT"},
    {3, "NOT_SUPPORTED"},
    {4, "NO_PERMISSION"},
    {6, "NOT_FOUND"},
    {7, "INSUFFICIENT_SIZE"},
    {8, "INSUFFICIENT_POWER"},
    {9, "DRIVER_NOT_LOADED"},
    {10, "TIMEOUT"},
    {11, "IRQ_ISSUE"},
    {12, "LIBRARY_NOT_FOUND"},
    {13, "FUNCTION_NOT_FOUND"},
    {14, "CORRUPTED_INFOROM"},
    {15, "GPU_IS_LOST"},
    {16, "RESET_REQUIRED"},
    {17, "OPERATING_SYSTEM"},
    {18, "LIB_RM_VERSION_MISMATCH"},
    {19, "IN_USE"},
    {20, "MEMORY"},
    {21, "NO_DATA"},
    {25, "ARGUMENT_VERSION_MISMATCH"},
    {999, "UNKNOWN"},
};

static const char *KEY_NAMES[KEY_COUNT] = {
#define X(name) #name,
    KEYS(X)
#undef X
};

/* Models: what `gpus COUNT MODEL` starts from, in the words of `set`. Limits and sizes are those of
 * the boards; the load is that of a GPU in training. */
static const struct {
  const char *word, *name, *values;
} MODELS[] = {
    {"h100", "NVIDIA H100 80GB HBM3",
     "capability 9.0 util 97 mem_util 58 mem_used 43e9 mem_total 85520809984 mem_reserved 561e6 "
     "power 540 power_limit 700 temp 61 temp_mem 70 temp_margin 26 tlimit_slowdown -2 "
     "sm_clock 1980 sm_clock_max 1980 mem_clock 2619 throttle 0 pcie_gen 5 pcie_gen_max 5 "
     "pcie_width 16 pcie_width_max 16 pcie_tx 210000 pcie_rx 1450000 nvlinks 18 nvlinks_up 18 "
     "nvlink_tx +41e6 nvlink_rx +41e6 nvlink_crc 0 nvlink_replay 0 nvlink_recovery 0 "
     "ecc_corrected 0 ecc_uncorrected 0 ecc_corrected_ever 0 ecc_uncorrected_ever 0 "
     "remapped_corrected 0 remapped_uncorrected 0 remapped_pending 0 remapped_failure 0 pstate 0 "
     "gpm 1 sm_activity 84 sm_occupancy 31 tensor_activity 38 dram_activity 52 fp16_activity 4 "
     "fp32_activity 9 fp64_activity 0"},
    {"a100", "NVIDIA A100-SXM4-80GB",
     "capability 8.0 util 96 mem_util 49 mem_used 38e9 mem_total 85899345920 mem_reserved 630e6 "
     "power 330 power_limit 400 temp 58 temp_mem 66 temp_slowdown 89 temp_shutdown 92 "
     "sm_clock 1410 sm_clock_max 1410 mem_clock 1593 throttle 0 pcie_gen 4 pcie_gen_max 4 "
     "pcie_width 16 pcie_width_max 16 pcie_tx 120000 pcie_rx 900000 nvlinks 12 nvlinks_up 12 "
     "nvlink_tx +21e6 nvlink_rx +21e6 nvlink_crc 0 nvlink_replay 0 nvlink_recovery 0 "
     "ecc_corrected 0 ecc_uncorrected 0 ecc_corrected_ever 0 ecc_uncorrected_ever 0 "
     "remapped_corrected 0 remapped_uncorrected 0 remapped_pending 0 remapped_failure 0 pstate 0"},
    {"rtx4090", "NVIDIA GeForce RTX 4090",
     "capability 8.9 util 98 mem_util 41 mem_used 17e9 mem_total 25757220864 mem_reserved 350e6 "
     "power 372 power_limit 450 temp 66 temp_margin 17 tlimit_slowdown -5 sm_clock 2685 "
     "sm_clock_max 3105 mem_clock 10501 throttle 0 pcie_gen 4 pcie_gen_max 4 pcie_width 16 "
     "pcie_width_max 16 pcie_tx 80000 pcie_rx 640000 fan 54 pstate 2"},
    {"t4", "Tesla T4",
     "capability 7.5 util 99 mem_util 62 mem_used 9e9 mem_total 16106127360 mem_reserved 250e6 "
     "power 66 power_limit 70 temp 71 temp_slowdown 93 temp_shutdown 96 sm_clock 1350 "
     "sm_clock_max 1590 mem_clock 5000 throttle 0 pcie_gen 3 pcie_gen_max 3 pcie_width 16 "
     "pcie_width_max 16 pcie_tx 40000 pcie_rx 310000 ecc_corrected 0 ecc_uncorrected 0 "
     "ecc_corrected_ever 0 ecc_uncorrected_ever 0 retired_corrected 0 retired_uncorrected 0 "
     "retired_pending 0 pstate 0"},
    {"bare", "NVIDIA Test GPU", ""},
};

int error_code(const char *name) {
  for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
    if (strcmp(ERRORS[i].name, name) == 0) return ERRORS[i].code;
  return -1;
}

const char *error_name(int code) {
  for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
    if (ERRORS[i].code == code) return ERRORS[i].name;
  return "Unknown Error";
}

static int complain(int line, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "nvml stand-in, script line %d: ", line);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
  return -1;
}

static int number(const char *word, double *result) {
  char *end;
  *result = strtod(word, &end);
  return end == word || *end ? -1 : 0;
}

/* -- values ------------------------------------------------------------------------------------ */

/* "a<mark>b,c<mark>d": pairs; "a,b,c" with mark 0: single numbers. */
static int read_points(const char *word, char mark, struct value *value) {
  size_t room = strlen(word) + 1;
  value->points = malloc(2 * room * sizeof(double));
  const char *at = word;
  for (int n = 0;; n++) {
    char *end;
    value->points[n] = strtod(at, &end);
    if (end == at) return -1;
    value->count = n + 1;
    if (!*end) return mark && n % 2 == 0 ? -1 : 0;
    if (*end != (mark && n % 2 == 0 ? mark : ',')) return -1;
    at = end + 1;
  }
}

static int read_value(const char *word, struct value *value) {
  free(value->points);
  memset(value, 0, sizeof *value);
  if (strcmp(word, "none") == 0) {
    value->kind = REFUSED;
    value->error = NOT_SUPPORTED;
    return 0;
  }
  if (*word == '!') {
    value->kind = REFUSED;
    value->error = error_code(word + 1);
    return value->error > 0 ? 0 : -1;
  }
  if (*word == '~') {
    value->kind = WAVE;
    return read_points(word + 1, 0, value) || value->count != 3 ? -1 : 0;
  }
  if (*word == '+') {
    value->kind = GROWING;
    return read_points(word + 1, 0, value) || value->count != 1 ? -1 : 0;
  }
  char mark = strchr(word, ':') ? ':' : strchr(word, '@') ? '@' : 0;
  value->kind = mark == ':' ? LINEAR : mark == '@' ? STEPS : CONSTANT;
  if (read_points(word, mark, value)) return -1;
  return value->kind == CONSTANT && value->count != 1 ? -1 : 0;
}

int value_at(const struct value *value, double t, double *result) {
  const double *p = value->points;
  int last = value->count - 2;
  switch (value->kind) {
  case REFUSED:
    return value->error;
  case CONSTANT:
    *result = p[0];
    return 0;
  case GROWING:
    *result = t > 0 ? p[0] * t : 0;
    return 0;
  case WAVE:
    *result = p[0] + p[1] * sin(6.283185307179586 * t / p[2]);
    return 0;
  case LINEAR:
  case STEPS:
    break;
  }
  if (t < p[0]) {
    *result = p[1];
    return 0;
  }
  for (int i = 0; i < last; i += 2)
    if (t < p[i + 2]) {
      double share = value->kind == STEPS ? 0 : (t - p[i]) / (p[i + 2] - p[i]);
      *result = p[i + 1] + share * (p[i + 3] - p[i + 1]);
      return 0;
    }
  *result = p[last + 1];
  return 0;
}

static int set_value(struct device *device, const char *word, const char *text, int line) {
  if (strcmp(word, "name") == 0 || strcmp(word, "uuid") == 0) {
    char *field = *word == 'n' ? device->name : device->uuid;
    snprintf(field, sizeof device->name, "%s", text);
    return 0;
  }
  for (int key = 0; key < KEY_COUNT; key++)
    if (strcmp(KEY_NAMES[key], word) == 0) {
      if (read_value(text, &device->values[key])) return complain(line, "no value: %s", text);
      return 0;
    }
  return complain(line, "no such reading: %s", word);
}

/* -- targets ----------------------------------------------------------------------------------- */

struct target {
  int gpu, slot;
};

/* "3", "0-3", "0,2", "*", "0/1" (a slice): at most MAX_GPUS targets; how many, or -1. */
static int read_targets(const struct script *script, const char *word, struct target *targets) {
  int count = 0;
  if (strcmp(word, "*") == 0) {
    for (; count < script->gpu_count; count++) targets[count] = (struct target){count, 0};
    return count;
  }
  while (*word) {
    char *end;
    long first = strtol(word, &end, 10), last = first, slot = 0;
    if (end == word) return -1;
    if (*end == '-') last = strtol(end + 1, &end, 10);
    if (*end == '/') slot = 1 + strtol(end + 1, &end, 10);
    if (*end && *end != ',') return -1;
    for (long gpu = first; gpu <= last; gpu++) {
      if (gpu < 0 || gpu >= script->gpu_count || slot < 0 || slot >= SLOTS || count == MAX_GPUS ||
          !script->devices[gpu][slot].present)
        return -1;
      targets[count++] = (struct target){(int)gpu, (int)slot};
    }
    word = *end ? end + 1 : end;
  }
  return count;
}

/* -- lines ------------------------------------------------------------------------------------- */

/* Cuts the line into words in place; "quoted words" may hold spaces; # begins a comment. */
static int split(char *line, char **words) {
  int count = 0;
  while (count < MAX_WORDS) {
    line += strspn(line, " \t\r\n");
    if (!*line || *line == '#') break;
    const char *stop = " \t\r\n";
    if (*line == '"') {
      stop = "\"";
      line++;
    }
    words[count++] = line;
    line += strcspn(line, stop);
    if (!*line) break;
    *line++ = 0;
  }
  return count;
}

static int add_gpus(struct script *script, char **words, int count, int line) {
  double wanted;
  if (count != 3 || number(words[1], &wanted)) return complain(line, "gpus COUNT MODEL");
  for (size_t m = 0; m < sizeof MODELS / sizeof *MODELS; m++) {
    if (strcmp(MODELS[m].word, words[2])) continue;
    for (int i = 0; i < (int)wanted; i++) {
      if (script->gpu_count == MAX_GPUS) return complain(line, "more than %d GPUs", MAX_GPUS);
      int index = script->gpu_count++;
      struct device *device = &script->devices[index][0];
      device->present = 1;
      snprintf(device->name, sizeof device->name, "%s", MODELS[m].name);
      snprintf(device->uuid, sizeof device->uuid, "GPU-5eed0000-0000-4000-8000-%012x", index);
      device->gpu_instance = device->compute_instance = 0xFFFFFFFFu;
      for (int key = 0; key < KEY_COUNT; key++) device->values[key].error = NOT_SUPPORTED;
      char values[2048], *pairs[2 * KEY_COUNT];
      snprintf(values, sizeof values, "%s", MODELS[m].values);
      int n = 0;
      for (char *word = strtok(values, " "); word; word = strtok(NULL, " ")) pairs[n++] = word;
      for (int k = 0; k + 1 < n; k += 2)
        if (set_value(device, pairs[k], pairs[k + 1], line)) return -1;
    }
    return 0;
  }
  return complain(line, "no such model: %s", words[2]);
}

static int add_slice(struct script *script, char **words, int count, int line) {
  double v[5];
  if (count != 7) return complain(line, "slice GPU NUMBER GI CI PROFILE BYTES");
  for (int i = 0; i < 4; i++)
    if (number(words[1 + i], &v[i])) return complain(line, "no number: %s", words[1 + i]);
  if (number(words[6], &v[4])) return complain(line, "no number: %s", words[6]);
  int gpu = (int)v[0], nr = (int)v[1];
  if (gpu < 0 || gpu >= script->gpu_count || nr < 0 || nr >= MAX_SLICES)
    return complain(line, "no such place for a slice: %s %s", words[1], words[2]);
  struct device *parent = &script->devices[gpu][0], *slice = &script->devices[gpu][1 + nr];
  char board[64];
  snprintf(board, sizeof board, "%.63s", parent->name);
  slice->present = 1;
  snprintf(slice->name, sizeof slice->name, "%s MIG %.20s", board, words[5]);
  snprintf(slice->uuid, sizeof slice->uuid, "MIG-5eed0000-0000-4000-8%03x-%012x", nr + 1, gpu);
  slice->gpu_instance = (unsigned)v[2];
  slice->compute_instance = (unsigned)v[3];
  for (int key = 0; key < KEY_COUNT; key++) slice->values[key].error = NOT_SUPPORTED;
  if (set_value(slice, "mem_used", "0", line)) return -1;
  return set_value(slice, "mem_total", words[6], line);
}

static int add_process(struct device *device, const char *pid, double bytes, int graphics) {
  size_t size = (size_t)(device->process_count + 1) * sizeof(struct process);
  device->processes = realloc(device->processes, size);
  struct process *process = &device->processes[device->process_count++];
  process->pid = strcmp(pid, "self") == 0 ? (unsigned)getpid() : (unsigned)strtoul(pid, NULL, 10);
  process->bytes = bytes < 0 ? ~0ull : (unsigned long long)bytes;
  process->graphics = graphics;
  return 0;
}

/* "from T", "until T" and "at T" after the fixed words of a line. */
static int read_times(char **words, int count, double *from, double *until, int line) {
  for (int i = 0; i < count; i += 2) {
    double *place = !strcmp(words[i], "from") || !strcmp(words[i], "at") ? from
                    : !strcmp(words[i], "until")                         ? until
                                                                         : NULL;
    if (!place || i + 1 >= count || number(words[i + 1], place))
      return complain(line, "from T, until T or at T, not: %s", words[i]);
  }
  return 0;
}

static void add_rule(struct script *script, struct rule rule) {
  size_t size = (size_t)(script->rule_count + 1) * sizeof rule;
  script->rules = realloc(script->rules, size);
  script->rules[script->rule_count++] = rule;
}

static void add_xid(struct script *script, int gpu, double code, double at) {
  struct xid xid = {.gpu = gpu, .code = (unsigned long long)code, .at = at};
  for (int i = 0; i < script->xid_count; i++) {
    struct xid *other = &script->xids[i];
    xid.nth += other->gpu == gpu && other->code == xid.code && other->at == at;
  }
  script->xids = realloc(script->xids, (size_t)(script->xid_count + 1) * sizeof xid);
  script->xids[script->xid_count++] = xid;
}

static int read_rule(struct script *script, char **words, int count, int line) {
  struct rule rule = {.call = "*", .from = -1e300, .until = 1e300, .error = 15};
  rule.kind = !strcmp(words[0], "fail") ? FAIL : !strcmp(words[0], "hang") ? HANG : LOST;
  int fixed = rule.kind == LOST ? 2 : 4;
  if (count < fixed) return complain(line, "too few words");
  if (rule.kind != LOST) snprintf(rule.call, sizeof rule.call, "%s", words[2]);
  if (rule.kind == FAIL && (rule.error = error_code(words[3])) < 0)
    return complain(line, "no such error: %s", words[3]);
  if (rule.kind == HANG) {
    rule.seconds = -1;
    if (strcmp(words[3], "forever") && number(words[3], &rule.seconds))
      return complain(line, "seconds or forever, not: %s", words[3]);
  }
  if (read_times(words + fixed, count - fixed, &rule.from, &rule.until, line)) return -1;
  if (strcmp(words[1], "-") == 0) {
    rule.gpu = NO_DEVICE;
    add_rule(script, rule);
    return 0;
  }
  struct target targets[MAX_GPUS];
  int n = read_targets(script, words[1], targets);
  if (n < 0) return complain(line, "no such GPUs: %s", words[1]);
  for (int i = 0; i < n; i++) {
    rule.gpu = targets[i].gpu;
    rule.slot = targets[i].slot;
    add_rule(script, rule);
  }
  return 0;
}

/* set, process and xid: something for each of several devices. */
static int read_for_each(struct script *script, char **words, int count, int line) {
  struct target targets[MAX_GPUS];
  double amount, at = -1, never = 0;
  int n = count > 2 ? read_targets(script, words[1], targets) : -1;
  if (n < 0) return complain(line, "no such GPUs, or too few words");
  int is_process = !strcmp(words[0], "process"), is_xid = !strcmp(words[0], "xid");
  if (is_process && (count < 4 || number(words[3], &amount)))
    return complain(line, "process GPUS PID BYTES [graphics]");
  if (is_xid && (number(words[2], &amount) ||
                 read_times(words + 3, count - 3, &at, &never, line)))
    return complain(line, "xid GPUS CODE [at T]");
  if (!is_process && !is_xid && count % 2) return complain(line, "set GPUS READING VALUE ...");
  for (int i = 0; i < n; i++) {
    struct device *device = &script->devices[targets[i].gpu][targets[i].slot];
    if (is_process) {
      add_process(device, words[2], amount, count > 4 && !strcmp(words[4], "graphics"));
    } else if (is_xid) {
      add_xid(script, targets[i].gpu, amount, at);
    } else {
      for (int k = 2; k + 1 < count; k += 2)
        if (set_value(device, words[k], words[k + 1], line)) return -1;
    }
  }
  return 0;
}

static int read_line(struct script *script, char **words, int count, int line) {
  const char *verb = words[0];
  if (!strcmp(verb, "gpus")) return add_gpus(script, words, count, line);
  if (!strcmp(verb, "slice")) return add_slice(script, words, count, line);
  if (!strcmp(verb, "set") || !strcmp(verb, "process") || !strcmp(verb, "xid"))
    return read_for_each(script, words, count, line);
  if (!strcmp(verb, "fail") || !strcmp(verb, "hang") || !strcmp(verb, "lost"))
    return read_rule(script, words, count, line);
  if (count != 2) return complain(line, "%s takes one word", verb);
  if (!strcmp(verb, "driver")) {
    snprintf(script->driver, sizeof script->driver, "%s", words[1]);
    return 0;
  }
  if (!strcmp(verb, "start")) return number(words[1], &script->start);
  if (!strcmp(verb, "init")) {
    script->init_error = error_code(words[1]);
    return script->init_error < 0 ? complain(line, "no such error: %s", words[1]) : 0;
  }
  return complain(line, "unknown word: %s", verb);
}

struct script *script_read(const char *path) {
  FILE *file = fopen(path, "r");
  if (!file) {
    fprintf(stderr, "nvml stand-in: can't read the script %s\n", path);
    return NULL;
  }
  struct script *script = calloc(1, sizeof *script);
  snprintf(script->driver, sizeof script->driver, "575.57.08");
  script->start = -1;
  char *text = NULL, *words[MAX_WORDS];
  size_t room = 0;
  int failed = 0;
  for (int line = 1; !failed && getline(&text, &room, file) >= 0; line++) {
    int count = split(text, words);
    failed = count > 0 && read_line(script, words, count, line);
  }
  free(text);
  fclose(file);
  if (!failed) return script;
  script_free(script);
  return NULL;
}

void script_free(struct script *script) {
  if (!script) return;
  for (int g = 0; g < MAX_GPUS; g++)
    for (int s = 0; s < SLOTS; s++) {
      struct device *device = &script->devices[g][s];
      if (!device->present) continue;
      for (int key = 0; key < KEY_COUNT; key++) free(device->values[key].points);
      free(device->processes);
    }
  free(script->rules);
  free(script->xids);
  free(script);
}
