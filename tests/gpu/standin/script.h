/* What a stand-in script says, once parsed; the format is described in nvml_standin.c. */

#ifndef LTUI_STANDIN_SCRIPT_H
#define LTUI_STANDIN_SCRIPT_H

#include <stddef.h>

#define MAX_GPUS 64
#define MAX_SLICES 7
#define SLOTS (1 + MAX_SLICES) /* a GPU itself, then its MIG slices */
#define NO_DEVICE (-1)         /* target of calls that name no GPU */

/* Every number that a GPU can have. X(name) gives the enumerator K_name and the word in a script. */
#define KEYS(X)                                                                                    \
  X(util) X(mem_util) X(mem_used) X(mem_total) X(mem_reserved) X(power) X(power_limit) X(temp)     \
  X(temp_mem) X(temp_slowdown) X(temp_shutdown) X(temp_margin) X(tlimit_slowdown) X(sm_clock)      \
  X(sm_clock_max) X(mem_clock) X(throttle) X(pcie_gen) X(pcie_gen_max) X(pcie_width)               \
  X(pcie_width_max) X(pcie_tx) X(pcie_rx) X(nvlinks) X(nvlinks_up) X(nvlink_tx) X(nvlink_rx)       \
  X(nvlink_crc) X(nvlink_replay) X(nvlink_recovery) X(ecc_corrected) X(ecc_uncorrected)            \
  X(ecc_corrected_ever) X(ecc_uncorrected_ever) X(retired_corrected) X(retired_uncorrected)        \
  X(retired_pending) X(remapped_corrected) X(remapped_uncorrected) X(remapped_pending)             \
  X(remapped_failure) X(fan) X(pstate) X(capability) X(gpm) X(sm_activity) X(sm_occupancy)         \
  X(tensor_activity) X(dram_activity) X(fp16_activity) X(fp32_activity) X(fp64_activity)

enum key {
#define X(name) K_##name,
  KEYS(X)
#undef X
      KEY_COUNT
};

enum value_kind { REFUSED, CONSTANT, LINEAR, STEPS, GROWING, WAVE };

struct value {
  enum value_kind kind;
  int error; /* of REFUSED; NVML's code */
  int count;
  double *points; /* pairs (time, value); parameters of GROWING and WAVE */
};

struct process {
  unsigned pid;
  unsigned long long bytes;
  int graphics;
};

struct device {
  int present;
  char name[96];
  char uuid[96];
  unsigned gpu_instance, compute_instance;
  struct value values[KEY_COUNT];
  struct process *processes;
  int process_count;
};

enum rule_kind { FAIL, HANG, LOST };

struct rule {
  enum rule_kind kind;
  int gpu, slot; /* gpu NO_DEVICE: a call that names none */
  char call[64]; /* "*" for every call */
  int error;
  double seconds; /* of HANG; negative: for ever */
  double from, until;
};

struct xid {
  int gpu, nth; /* nth of several equal lines */
  unsigned long long code;
  double at; /* negative: as soon as the line is read */
};

struct script {
  char driver[80];
  double start; /* unix time of the script's zero; negative: the process's first nvmlInit */
  int init_error;
  int gpu_count;
  struct device devices[MAX_GPUS][SLOTS];
  struct rule *rules;
  int rule_count;
  struct xid *xids;
  int xid_count;
};

/* The script in this file, or NULL with a line on standard error that names what is wrong. */
struct script *script_read(const char *path);
void script_free(struct script *script);

/* The value at script time t: 0, or NVML's error code for a refused one. */
int value_at(const struct value *value, double t, double *result);

/* NVML's code for "NOT_SUPPORTED" and the like, or -1. */
int error_code(const char *name);
const char *error_name(int code);

#endif
