/* Library for LD_PRELOAD: a wall clock that is fast by TEST_CLOCK_SKEW_S seconds. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long skew(void) {
    const char *text = getenv("TEST_CLOCK_SKEW_S");
    return text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *t) {
    int failed = (int)syscall(SYS_clock_gettime, clock, t);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) t->tv_sec += skew();
    return failed;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    int failed = (int)syscall(SYS_gettimeofday, t, zone);
    if (!failed && t) t->tv_sec += skew();
    return failed;
}

time_t time(time_t *result) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (result) *result = t.tv_sec;
    return t.tv_sec;
}
