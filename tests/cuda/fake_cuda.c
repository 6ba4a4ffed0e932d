/*
 * A stand-in for the CUDA driver, for tests: libcuda.so.1 without a GPU, as far as numapin/system/cuda.py calls it.
 *
 * It does no work; it keeps the driver's books and refuses what the driver refuses: calls before cuInit and in a forked
 * child, calls without a current context, overlapping registrations, a record or an event query that a capture of
 * global mode forbids (which also breaks that capture). Every stream is past every copy and every wait; an event that
 * is held back passes when the host waits for it. Built with -DOLD_CUDA it lacks cuCtxRecordEvent.
 *
 * It is steered by numbers with names, the table `numbers` below. Each starts as the environment says, FAKE_CUDA_ and
 * the name in capitals, else as the table says. In the process itself, fake_cuda_set and fake_cuda_get change and read
 * them, and fake_cuda_reset begins anew. Negative is no limit.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    ASSERT = 710,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    CAPTURE_UNSUPPORTED = 900
};
enum { PORTABLE = 1, BLOCKING_SYNC = 1, DISABLE_TIMING = 2, RELAXED = 2 };
enum { MAX_DEVICES = 8, MAX_RANGES = 256, MAX_DEPTH = 16, NAME = 64 };

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ASSERT, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the memory is registered"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer is not the start of a registration"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
};

/* What steers, then what is counted. */
enum {
    DEVICES,     /* how many there are; 0: cuInit says NO_DEVICE */
    ACTIVE,      /* which primary contexts are active: a mask of devices; cuDevicePrimaryCtxRetain adds to it */
    LIMIT_BYTES, /* as much can be registered in all */
    HOLD_EVENTS, /* 1: events pass up to number `passed` only, in the order of their records */
    PASSED,
    CAPTURING,  /* 1: some stream of every context is capturing, in global mode, until the capture is broken */
    CHILD_ABORTS, /* 1: a call in a forked child ends it, as torch does with the error that the driver returns */
    QUERY_FAILS, /* a CUresult: what cuEventQuery answers */
    RECORDED,    /* events recorded, since reset */
    CREATED,     /* events created */
    WAITED,      /* waits of streams for events */
    REGISTERED_BYTES,
    REGISTERED_RANGES,
    RETAINED,    /* cuDevicePrimaryCtxRetain called */
    INVALIDATED, /* captures broken */
    NUM_NUMBERS
};
static struct {
    const char *name;
    long start, value;
} numbers[NUM_NUMBERS] = {
    [DEVICES] = {"devices", 2, 0},
    [ACTIVE] = {"active", 1, 0},
    [LIMIT_BYTES] = {"limit_bytes", -1, 0},
    [HOLD_EVENTS] = {"hold_events", 0, 0},
    [PASSED] = {"passed", 0, 0},
    [CAPTURING] = {"capturing", 0, 0},
    [CHILD_ABORTS] = {"child_aborts", 0, 0},
    [QUERY_FAILS] = {"query_fails", 0, 0},
    [RECORDED] = {"recorded", 0, 0},
    [CREATED] = {"created", 0, 0},
    [WAITED] = {"waited", 0, 0},
    [REGISTERED_BYTES] = {"registered_bytes", 0, 0},
    [REGISTERED_RANGES] = {"registered_ranges", 0, 0},
    [RETAINED] = {"retained", 0, 0},
    [INVALIDATED] = {"invalidated", 0, 0},
};
#define N(which) (numbers[which].value)

typedef struct {
    int device;
} Context;
typedef struct {
    Context *context;
    long record; /* the number of its latest record; 0: none, and it has passed */
    unsigned flags;
} Event;

static Context contexts[MAX_DEVICES];
static struct {
    char *from;
    size_t bytes;
} ranges[MAX_RANGES]; /* the first N(REGISTERED_RANGES) */
static pid_t initialized;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread Context *current[MAX_DEPTH];
static __thread Context *base; /* cuCtxSetCurrent's, below the ones that were pushed */
static __thread int depth, mode;

/* ---- steering ---- */

void fake_cuda_reset(void) {
    for (int i = 0; i < NUM_NUMBERS; i++) {
        char variable[NAME];
        snprintf(variable, sizeof variable, "FAKE_CUDA_%s", numbers[i].name);
        for (char *c = variable; *c; c++) *c = (char)toupper((unsigned char)*c);
        const char *told = getenv(variable);
        N(i) = told ? atol(told) : numbers[i].start;
    }
    initialized = 0;
    depth = mode = 0; /* the calling thread's */
}

__attribute__((constructor)) static void begin(void) { fake_cuda_reset(); }

static long *number(const char *name) {
    for (int i = 0; i < NUM_NUMBERS; i++)
        if (strcmp(name, numbers[i].name) == 0) return &N(i);
    fprintf(stderr, "fake_cuda: there is no number called %s\n", name);
    abort();
}

void fake_cuda_set(const char *name, long value) {
    pthread_mutex_lock(&lock);
    *number(name) = value;
    pthread_mutex_unlock(&lock);
}

long fake_cuda_get(const char *name) {
    pthread_mutex_lock(&lock);
    long value = *number(name);
    pthread_mutex_unlock(&lock);
    return value;
}

/* Of the calling thread: how many contexts are pushed, and the capture mode. */
int fake_cuda_depth(void) { return depth; }
int fake_cuda_mode(void) { return mode; }

/* ---- what several calls share; the lock is held ---- */

static int usable(void) {
    if (initialized == getpid()) return SUCCESS;
    if (initialized && N(CHILD_ABORTS)) abort();
    return NOT_INITIALIZED;
}

static int break_capture(void) {
    N(CAPTURING) = 0;
    N(INVALIDATED)++;
    return CAPTURE_UNSUPPORTED;
}

/* Of calls that are "potentially unsafe" during a capture: the calling thread's mode decides. */
static int unsafe(void) { return N(CAPTURING) && mode != RELAXED ? break_capture() : SUCCESS; }

static int find_device(int device) { return device >= 0 && device < N(DEVICES) ? SUCCESS : INVALID_DEVICE; }

static int in_context(void) { return depth > 0 || base ? SUCCESS : INVALID_CONTEXT; }

/* What torch does for pinned memory of its own: a potentially unsafe call. */
void fake_cuda_allocate(void) {
    pthread_mutex_lock(&lock);
    unsafe();
    pthread_mutex_unlock(&lock);
}

int fake_cuda_is_registered(const char *at) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (long i = 0; i < N(REGISTERED_RANGES); i++) found |= ranges[i].from <= at && at < ranges[i].from + ranges[i].bytes;
    pthread_mutex_unlock(&lock);
    return found;
}

static int register_range(char *from, size_t bytes) {
    long count = N(REGISTERED_RANGES);
    for (long i = 0; i < count; i++)
        if (from < ranges[i].from + ranges[i].bytes && ranges[i].from < from + bytes) return ALREADY_REGISTERED;
    if (N(LIMIT_BYTES) >= 0 && N(REGISTERED_BYTES) + (long)bytes > N(LIMIT_BYTES)) return OUT_OF_MEMORY;
    if (count == MAX_RANGES) return OUT_OF_MEMORY;
    ranges[count].from = from;
    ranges[count].bytes = bytes;
    N(REGISTERED_RANGES)++;
    N(REGISTERED_BYTES) += (long)bytes;
    return SUCCESS;
}

static int unregister_range(const char *from) {
    for (long i = 0; i < N(REGISTERED_RANGES); i++) {
        if (ranges[i].from == from) {
            N(REGISTERED_BYTES) -= (long)ranges[i].bytes;
            ranges[i] = ranges[--N(REGISTERED_RANGES)];
            return SUCCESS;
        }
    }
    return NOT_REGISTERED;
}

static int query(const Event *event) {
    if (!event) return INVALID_HANDLE;
    if (N(QUERY_FAILS)) return (int)N(QUERY_FAILS);
    return N(HOLD_EVENTS) && event->record > N(PASSED) ? NOT_READY : SUCCESS;
}

/* ---- the driver's calls ---- */

/* Answer with the first of several steps that refuses: `a ?: b` is b where a is SUCCESS. */
#define ANSWER(steps)                        \
    do {                                     \
        pthread_mutex_lock(&lock);           \
        int result = usable() ?: (steps);    \
        pthread_mutex_unlock(&lock);         \
        return result;                       \
    } while (0)

int cuInit(unsigned flags) {
    pthread_mutex_lock(&lock);
    int forked = initialized != 0 && initialized != getpid();
    int result = flags ? INVALID_VALUE : forked ? NOT_INITIALIZED : N(DEVICES) == 0 ? NO_DEVICE : SUCCESS;
    if (!result) initialized = getpid();
    pthread_mutex_unlock(&lock);
    return result;
}

int cuDeviceGetCount(int *count) { ANSWER((*count = (int)N(DEVICES), SUCCESS)); }

int cuDeviceGet(int *device, int ordinal) { ANSWER(find_device(ordinal) ?: (*device = ordinal, SUCCESS)); }

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    ANSWER(find_device(device) ?: (*flags = 0, *active = (int)(N(ACTIVE) >> device & 1), SUCCESS));
}

static Context *retain(int device) {
    N(RETAINED)++;
    N(ACTIVE) |= 1L << device;
    contexts[device].device = device;
    return &contexts[device];
}

int cuDevicePrimaryCtxRetain(Context **context, int device) {
    ANSWER(unsafe() ?: find_device(device) ?: (*context = retain(device), SUCCESS));
}

int cuCtxPushCurrent_v2(Context *context) {
    ANSWER(!context || depth == MAX_DEPTH ? INVALID_CONTEXT : (current[depth++] = context, SUCCESS));
}

int cuCtxGetCurrent(Context **context) { ANSWER((*context = depth > 0 ? current[depth - 1] : base, SUCCESS)); }

int cuCtxSetCurrent(Context *context) {
    ANSWER(!context || depth > 0 ? INVALID_CONTEXT : (base = context, SUCCESS));
}

int cuCtxPopCurrent_v2(Context **context) { ANSWER(depth < 1 ? INVALID_CONTEXT : (*context = current[--depth], SUCCESS)); }

int cuMemHostRegister_v2(void *from, size_t bytes, unsigned flags) {
    int wrong = !from || !bytes || flags != PORTABLE ? INVALID_VALUE : SUCCESS;
    ANSWER(wrong ?: unsafe() ?: in_context() ?: register_range(from, bytes));
}

int cuMemHostUnregister(void *from) { ANSWER(unsafe() ?: in_context() ?: unregister_range(from)); }

int cuEventCreate(Event **event, unsigned flags) {
    int wrong = flags & ~(unsigned)(BLOCKING_SYNC | DISABLE_TIMING) ? INVALID_VALUE : SUCCESS;
    Event *made = calloc(1, sizeof *made);
    if (!made) abort();
    made->context = depth > 0 ? current[depth - 1] : base;
    made->flags = flags;
    ANSWER(wrong ?: in_context() ?: (*event = made, N(CREATED)++, SUCCESS));
}

#ifndef OLD_CUDA
static int record(Context *context, Event *event) {
    if (!context || !event || event->context != context) return INVALID_HANDLE;
    if (N(CAPTURING)) return break_capture(); /* in every mode, as the driver's documentation says */
    event->record = ++N(RECORDED);
    return SUCCESS;
}

int cuCtxRecordEvent(Context *context, Event *event) { ANSWER(record(context, event)); }
#endif

static int record_on(Event *event) {
    if (!event) return INVALID_HANDLE;
    event->record = ++N(RECORDED);
    return SUCCESS;
}

int cuEventRecord(Event *event, void *stream) {
    (void)stream;
    ANSWER(in_context() ?: record_on(event));
}

int cuStreamWaitEvent(void *stream, Event *event, unsigned flags) {
    (void)stream;
    ANSWER(!event || flags ? INVALID_VALUE : in_context() ?: (N(WAITED)++, SUCCESS));
}

static int wait_for(const Event *event) {
    if (!event) return INVALID_HANDLE;
    if (event->record > N(PASSED)) N(PASSED) = event->record;
    return SUCCESS;
}

int cuEventSynchronize(Event *event) { ANSWER(unsafe() ?: wait_for(event)); }

static int elapsed(float *ms, const Event *from, const Event *to) {
    if (!from || !to || (from->flags | to->flags) & DISABLE_TIMING) return INVALID_HANDLE;
    *ms = (float)(to->record - from->record);
    return query(from) ?: query(to);
}

int cuEventElapsedTime(float *ms, Event *from, Event *to) { ANSWER(elapsed(ms, from, to)); }

/* The device is host memory here. */
int cuMemcpyHtoDAsync_v2(void *target, const void *source, size_t bytes, void *stream) {
    (void)stream;
    ANSWER(!target || !source ? INVALID_VALUE : in_context() ?: (memcpy(target, source, bytes), SUCCESS));
}

int cuEventQuery(const Event *event) { ANSWER(unsafe() ?: query(event)); }

int cuThreadExchangeStreamCaptureMode(int *swapped) {
    int before = mode;
    ANSWER(*swapped < 0 || *swapped > RELAXED ? INVALID_VALUE : (mode = *swapped, *swapped = before, SUCCESS));
}

static int describe(int code, const char **name, const char **text) {
    *(name ? name : text) = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        if (errors[i].code != code) continue;
        if (name) *name = errors[i].name;
        if (text) *text = errors[i].text;
        return SUCCESS;
    }
    return INVALID_VALUE;
}

int cuGetErrorName(int code, const char **name) { return describe(code, name, NULL); }
int cuGetErrorString(int code, const char **text) { return describe(code, NULL, text); }
