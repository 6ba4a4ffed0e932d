/*
 * A stand-in for the NVIDIA management library, for tests: libnvidia-ml.so.1 without a GPU or a driver.
 *
 * The real pynvml loads it (put its folder on LD_LIBRARY_PATH). It answers from the text file that FAKE_NVML_DATA
 * names, read at nvmlInit, and fails as the real one does: NOT_SUPPORTED for what the file does not tell, any code for
 * what the file tells it to refuse, UNINITIALIZED before nvmlInit and after nvmlShutdown. Without the file it says
 * DRIVER_NOT_LOADED. If FAKE_NVML_LOG is set, the name of every function called is appended to that file, one a line.
 * Built with -DOLD_NVML it lacks some functions, as old drivers do.
 *
 * The data file: one statement a line; '#' starts a comment line. Masks are hexadecimal 64-bit words, lowest first.
 *
 *   driver 580.159.04              driver version
 *   fail init 18                   nvmlInit returns this nvmlReturn_t; so does `fail count 999`
 *   gpu                            begins the next GPU; the lines below, up to the next `gpu`, describe it
 *   uuid GPU-...
 *   pci 00000000:1B:00.0
 *   name NVIDIA H100 80GB HBM3
 *   cpus ffff ffff0000             CPU affinity
 *   memory 1                       node affinity
 *   numa_node 8                    the node that is this GPU's own memory
 *   pcie 5 16 5 16                 generation and width now, then at most
 *   mig_mode 1
 *   persistence 1                  persistence mode
 *   load 87 24000000               GPU utilisation in percent, and what it receives over PCIe in kB/s
 *   vram 12 80                     memory in use and in all, in MiB
 *   power 350000                   the power that it draws, in milliwatts
 *   process 4711 512               a process that computes on it, and its memory in MiB (without: 1024)
 *   ecc 2 7                        errors that ECC could not correct, since the driver started and in all
 *   rows 1 0                       whether a row is about to be remapped, and whether remapping has failed
 *   retirement 1                   whether a page is about to be retired
 *   reasons 48                     why its clocks are low: nvmlClocksEventReasons, hexadecimal
 *   mig 0 MIG-... NAME             one MIG instance: number, UUID, name
 *   nvlink 0 gpu 00000000:1C:00.0  one NVLink: number, far end (gpu, switch, npu or off), the far end's PCI address
 *   ancestor 1 50                  nvmlGpuTopologyLevel_t between this GPU and GPU 1
 *   fail memory 3                  this GPU refuses one question: handle or the word that gives the answer
 *   fail any 15                    this GPU refuses every question but its handle
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
    UNKNOWN = 999
};
enum { MAX_GPUS = 64, MAX_MIG = 8, MAX_LINKS = 36, MAX_WORDS = 128, MAX_FAILS = 8, MAX_PROCESSES = 8, TEXT = 96 };
enum { UNCORRECTED = 1 };
enum { PCIE_SENT = 0, PCIE_RECEIVED = 1 };
enum { LINK_GPU = 0, LINK_NPU = 1, LINK_SWITCH = 2, LINK_OFF = -1, LINK_NONE = -2 };

typedef struct {
    char question[TEXT];
    int code;
} Failure;

typedef struct {
    int known; /* how many words the file gave; 0: the file does not tell */
    unsigned long words[MAX_WORDS];
} Mask;

typedef struct {
    int present; /* of a MIG instance */
    char uuid[TEXT], pci[TEXT], name[TEXT];
    Mask cpus, memory;
    int numa_node;    /* -2: the file does not tell */
    int mig_mode;     /* -1: likewise */
    int persistence;  /* -1: likewise */
    int load[2];      /* -1: likewise */
    unsigned vram[2]; /* 0: likewise */
    unsigned power;   /* 0: likewise */
    unsigned pcie[4]; /* 0: likewise */
    int far_end[MAX_LINKS];
    char far_pci[MAX_LINKS][TEXT];
    int ancestor[MAX_GPUS]; /* -1: likewise */
    unsigned num_processes, processes[MAX_PROCESSES], process_mib[MAX_PROCESSES];
    int ecc[2], rows[2], retirement; /* -1: likewise */
    long long reasons;               /* -1: likewise */
    int num_fails;
    Failure fails[MAX_FAILS];
} Device;

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} PciInfo;

typedef struct {
    unsigned gpu, memory;
} Utilization;

typedef struct {
    unsigned long long total, free, used;
} Memory;

typedef struct {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
} ProcessInfo;

static Device gpus[MAX_GPUS], instances[MAX_GPUS][MAX_MIG], machine;
static unsigned num_gpus;
static int num_inits;
static char driver[TEXT];

/* ---- reading the data file ---- */

static void copy(char *to, size_t size, const char *from) { snprintf(to, size, "%s", from); }

static void clear(Device *device) {
    memset(device, 0, sizeof *device);
    device->numa_node = -2;
    device->mig_mode = device->persistence = device->load[0] = device->load[1] = -1;
    device->ecc[0] = device->ecc[1] = device->rows[0] = device->retirement = -1;
    device->reasons = -1;
    for (int i = 0; i < MAX_LINKS; i++) device->far_end[i] = LINK_NONE;
    for (int i = 0; i < MAX_GPUS; i++) device->ancestor[i] = -1;
}

static int read_mask(Mask *mask, const char *text) {
    char *end;
    for (;; text = end) {
        unsigned long word = strtoul(text, &end, 16);
        if (end == text) return mask->known > 0;
        if (mask->known == MAX_WORDS) return 0;
        mask->words[mask->known++] = word;
    }
}

static int read_mig(Device *gpu, const char *text) {
    Device *found = instances[gpu - gpus];
    char uuid[TEXT], name[TEXT];
    unsigned number;
    if (sscanf(text, "%u %95s %95[^\n]", &number, uuid, name) != 3 || number >= MAX_MIG) return 0;
    found[number].present = 1;
    copy(found[number].uuid, TEXT, uuid);
    copy(found[number].name, TEXT, name);
    return 1;
}

static int read_link(Device *gpu, const char *text) {
    static const struct {
        const char *word;
        int end;
    } ends[] = {{"gpu", LINK_GPU}, {"switch", LINK_SWITCH}, {"npu", LINK_NPU}, {"off", LINK_OFF}};
    char word[TEXT], pci[TEXT] = "FFFFFFFF:FF:FF.0"; /* what virtual machines show */
    unsigned link;
    if (sscanf(text, "%u %95s %95s", &link, word, pci) < 2 || link >= MAX_LINKS) return 0;
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        if (strcmp(word, ends[i].word) == 0) {
            gpu->far_end[link] = ends[i].end;
            copy(gpu->far_pci[link], TEXT, pci);
            return 1;
        }
    }
    return 0;
}

static int read_failure(Device *device, const char *text) {
    Failure *failure = &device->fails[device->num_fails];
    if (device->num_fails == MAX_FAILS) return 0;
    if (sscanf(text, "%95s %d", failure->question, &failure->code) != 2) return 0;
    device->num_fails++;
    return 1;
}

static int read_ancestor(Device *gpu, const char *text) {
    unsigned other;
    int level;
    if (sscanf(text, "%u %d", &other, &level) != 2 || other >= MAX_GPUS) return 0;
    gpu->ancestor[other] = level;
    return 1;
}

static int read_process(Device *gpu, const char *text) {
    unsigned number = gpu->num_processes;
    if (number == MAX_PROCESSES) return 0;
    gpu->process_mib[number] = 1024;
    gpu->num_processes++;
    return sscanf(text, "%u %u", &gpu->processes[number], &gpu->process_mib[number]) >= 1;
}

static Device *begin_gpu(void) {
    if (num_gpus == MAX_GPUS) return NULL;
    for (int i = 0; i < MAX_MIG; i++) clear(&instances[num_gpus][i]);
    clear(&gpus[num_gpus]);
    return &gpus[num_gpus++];
}

/* Reads what follows `word` in a line about `device`; 0 where that makes no sense. */
static int read_statement(Device *device, const char *word, const char *rest) {
    unsigned *pcie = device->pcie;
    if (strcmp(word, "fail") == 0) return read_failure(device, rest);
    if (strcmp(word, "driver") == 0) return copy(driver, TEXT, rest), 1;
    if (device == &machine) return 0;
    if (strcmp(word, "uuid") == 0) return copy(device->uuid, TEXT, rest), 1;
    if (strcmp(word, "pci") == 0) return copy(device->pci, TEXT, rest), 1;
    if (strcmp(word, "name") == 0) return copy(device->name, TEXT, rest), 1;
    if (strcmp(word, "cpus") == 0) return read_mask(&device->cpus, rest);
    if (strcmp(word, "memory") == 0) return read_mask(&device->memory, rest);
    if (strcmp(word, "numa_node") == 0) return sscanf(rest, "%d", &device->numa_node) == 1;
    if (strcmp(word, "pcie") == 0) return sscanf(rest, "%u %u %u %u", pcie, pcie + 1, pcie + 2, pcie + 3) == 4;
    if (strcmp(word, "mig_mode") == 0) return sscanf(rest, "%d", &device->mig_mode) == 1;
    if (strcmp(word, "persistence") == 0) return sscanf(rest, "%d", &device->persistence) == 1;
    if (strcmp(word, "load") == 0) return sscanf(rest, "%d %d", &device->load[0], &device->load[1]) == 2;
    if (strcmp(word, "vram") == 0) return sscanf(rest, "%u %u", &device->vram[0], &device->vram[1]) == 2;
    if (strcmp(word, "power") == 0) return sscanf(rest, "%u", &device->power) == 1;
    if (strcmp(word, "process") == 0) return read_process(device, rest);
    if (strcmp(word, "ecc") == 0) return sscanf(rest, "%d %d", &device->ecc[0], &device->ecc[1]) == 2;
    if (strcmp(word, "rows") == 0) return sscanf(rest, "%d %d", &device->rows[0], &device->rows[1]) == 2;
    if (strcmp(word, "retirement") == 0) return sscanf(rest, "%d", &device->retirement) == 1;
    if (strcmp(word, "reasons") == 0) return sscanf(rest, "%llx", (unsigned long long *)&device->reasons) == 1;
    if (strcmp(word, "mig") == 0) return read_mig(device, rest);
    if (strcmp(word, "nvlink") == 0) return read_link(device, rest);
    if (strcmp(word, "ancestor") == 0) return read_ancestor(device, rest);
    return 0;
}

static int read_data(FILE *file) {
    char line[4096], word[TEXT];
    Device *device = &machine;
    num_gpus = 0;
    driver[0] = '\0';
    clear(&machine);
    while (fgets(line, sizeof line, file)) {
        int length = 0;
        line[strcspn(line, "\n")] = '\0';
        if (sscanf(line, "%95s %n", word, &length) != 1 || word[0] == '#') continue;
        if (strcmp(word, "gpu") == 0) {
            device = begin_gpu();
        } else if (!read_statement(device, word, line + length)) {
            device = NULL;
        }
        if (device == NULL) {
            fprintf(stderr, "fake NVML: cannot read this line of FAKE_NVML_DATA: %s\n", line);
            return UNKNOWN;
        }
    }
    return SUCCESS;
}

/* ---- answering ---- */

static void record(const char *function) {
    const char *path = getenv("FAKE_NVML_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file == NULL) return;
    fprintf(file, "%s\n", function);
    fclose(file);
}

static int refusal(const Device *device, const char *question) {
    for (int i = 0; i < device->num_fails; i++) {
        const char *refused = device->fails[i].question;
        int any = strcmp(refused, "any") == 0 && strcmp(question, "handle") != 0;
        if (any || strcmp(refused, question) == 0) return device->fails[i].code;
    }
    return SUCCESS;
}

/* Every function begins so: note the call, refuse where the library is not started or the data file says so. */
static int begin(const char *function, const Device *device, const char *question) {
    record(function);
    if (num_inits == 0) return UNINITIALIZED;
    return device ? refusal(device, question) : INVALID_ARGUMENT;
}

#define BEGIN(device, question)                                                                                        \
    do {                                                                                                               \
        int code = begin(__func__, device, question);                                                                  \
        if (code != SUCCESS) return code;                                                                              \
    } while (0)

static int give_text(char *to, unsigned size, const char *from) {
    if (from[0] == '\0') return NOT_SUPPORTED;
    if (strlen(from) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}

static int give_number(unsigned *to, unsigned value) {
    if (value == 0) return NOT_SUPPORTED;
    *to = value;
    return SUCCESS;
}

static int give_mask(unsigned long *to, unsigned size, const Mask *mask) {
    if (size == 0) return INVALID_ARGUMENT;
    if (mask->known == 0) return NOT_SUPPORTED;
    for (unsigned i = 0; i < size; i++) to[i] = i < MAX_WORDS ? mask->words[i] : 0;
    return SUCCESS;
}

static int give_pci(PciInfo *to, const char *address) {
    if (address[0] == '\0') return NOT_SUPPORTED;
    memset(to, 0, sizeof *to);
    sscanf(address, "%x:%x:%x", &to->domain, &to->bus, &to->device);
    snprintf(to->bus_id, sizeof to->bus_id, "%.31s", address);
    snprintf(to->bus_id_legacy, sizeof to->bus_id_legacy, "%.15s", strlen(address) > 12 ? address + 4 : address);
    return SUCCESS;
}

static int start(const char *function) {
    const char *path = getenv("FAKE_NVML_DATA");
    FILE *file;
    int code;
    record(function);
    if (num_inits++ > 0) return SUCCESS;
    file = path ? fopen(path, "r") : NULL;
    code = file ? read_data(file) : DRIVER_NOT_LOADED;
    if (file) fclose(file);
    if (code == SUCCESS) code = refusal(&machine, "init");
    if (code != SUCCESS) num_inits = 0;
    return code;
}

int nvmlInit(void) { return start(__func__); }

int nvmlInit_v2(void) { return start(__func__); }

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return start(__func__);
}

int nvmlShutdown(void) {
    BEGIN(&machine, "shutdown");
    num_inits--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) { return code == SUCCESS ? "Success" : "An error that the fake NVML was told"; }

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    BEGIN(&machine, "driver");
    return give_text(version, size, driver);
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    BEGIN(&machine, "cuda");
    *version = 13000;
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    BEGIN(&machine, "count");
    *count = num_gpus;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **handle) {
    BEGIN(index < num_gpus ? &gpus[index] : NULL, "handle");
    *handle = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **handle) {
    BEGIN(&machine, "handle");
    for (unsigned i = 0; i < num_gpus; i++) {
        if (strcmp(gpus[i].uuid, uuid) == 0) return *handle = &gpus[i], refusal(&gpus[i], "handle");
    }
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(Device *device, unsigned *index) {
    BEGIN(device, "index");
    *index = (unsigned)(device - gpus);
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned size) {
    BEGIN(device, "uuid");
    return give_text(uuid, size, device->uuid);
}

int nvmlDeviceGetName(Device *device, char *name, unsigned size) {
    BEGIN(device, "name");
    return give_text(name, size, device->name);
}

int nvmlDeviceGetPciInfo_v3(Device *device, PciInfo *pci) {
    BEGIN(device, "pci");
    return give_pci(pci, device->pci);
}

int nvmlDeviceGetCpuAffinity(Device *device, unsigned size, unsigned long *cpus) {
    BEGIN(device, "cpus");
    return give_mask(cpus, size, &device->cpus);
}

int nvmlDeviceGetCurrPcieLinkGeneration(Device *device, unsigned *generation) {
    BEGIN(device, "pcie");
    return give_number(generation, device->pcie[0]);
}

int nvmlDeviceGetCurrPcieLinkWidth(Device *device, unsigned *width) {
    BEGIN(device, "pcie");
    return give_number(width, device->pcie[1]);
}

int nvmlDeviceGetMaxPcieLinkGeneration(Device *device, unsigned *generation) {
    BEGIN(device, "pcie");
    return give_number(generation, device->pcie[2]);
}

int nvmlDeviceGetMaxPcieLinkWidth(Device *device, unsigned *width) {
    BEGIN(device, "pcie");
    return give_number(width, device->pcie[3]);
}

int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    BEGIN(device, "mig_mode");
    if (device->mig_mode < 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned)device->mig_mode;
    return SUCCESS;
}

int nvmlDeviceGetPersistenceMode(Device *device, unsigned *mode) {
    BEGIN(device, "persistence");
    if (device->persistence < 0) return NOT_SUPPORTED;
    *mode = (unsigned)device->persistence;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *rates) {
    BEGIN(device, "busy");
    if (device->load[0] < 0) return NOT_SUPPORTED;
    rates->gpu = (unsigned)device->load[0];
    rates->memory = 0;
    return SUCCESS;
}

int nvmlDeviceGetPcieThroughput(Device *device, int counter, unsigned *kilobytes) {
    BEGIN(device, "throughput");
    if (device->load[1] < 0) return NOT_SUPPORTED;
    *kilobytes = counter == PCIE_RECEIVED ? (unsigned)device->load[1] : 1; /* 1: what was not asked for */
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    BEGIN(device, "vram");
    if (device->vram[1] == 0) return NOT_SUPPORTED;
    memory->total = (unsigned long long)device->vram[1] << 20;
    memory->used = (unsigned long long)device->vram[0] << 20;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned *milliwatts) {
    BEGIN(device, "power");
    return give_number(milliwatts, device->power);
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, ProcessInfo *infos) {
    unsigned room = infos ? *count : 0;
    BEGIN(device, "processes");
    *count = device->num_processes;
    if (device->num_processes > room) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < device->num_processes; i++) {
        unsigned long long bytes = (unsigned long long)device->process_mib[i] << 20;
        infos[i] = (ProcessInfo){device->processes[i], bytes, 0xFFFFFFFF, 0xFFFFFFFF};
    }
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(Device *device, int type, int counter, unsigned long long *count) {
    BEGIN(device, "ecc");
    if (type != UNCORRECTED || counter < 0 || counter > 1) return INVALID_ARGUMENT;
    if (device->ecc[counter] < 0) return NOT_SUPPORTED;
    *count = (unsigned long long)device->ecc[counter];
    return SUCCESS;
}

int nvmlDeviceGetRetiredPagesPendingStatus(Device *device, int *pending) {
    BEGIN(device, "retirement");
    if (device->retirement < 0) return NOT_SUPPORTED;
    *pending = device->retirement;
    return SUCCESS;
}

static int give_reasons(const Device *device, unsigned long long *reasons) {
    if (device->reasons < 0) return NOT_SUPPORTED;
    *reasons = (unsigned long long)device->reasons;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *reasons) {
    BEGIN(device, "reasons");
    return give_reasons(device, reasons);
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count) {
    BEGIN(device, "mig");
    *count = device->mig_mode == 1 ? MAX_MIG - 1 : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned number, Device **instance) {
    BEGIN(device, "mig");
    if (number >= MAX_MIG || !instances[device - gpus][number].present) return NOT_FOUND;
    *instance = &instances[device - gpus][number];
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(Device *device, unsigned link, unsigned *active) {
    BEGIN(device, "nvlink");
    if (device->far_end[0] == LINK_NONE) return NOT_SUPPORTED;
    if (link >= MAX_LINKS || device->far_end[link] == LINK_NONE) return INVALID_ARGUMENT;
    *active = device->far_end[link] != LINK_OFF;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device *device, unsigned link, PciInfo *pci) {
    BEGIN(device, "nvlink_pci");
    if (link >= MAX_LINKS || device->far_end[link] < 0) return INVALID_ARGUMENT;
    return give_pci(pci, device->far_pci[link]);
}

int nvmlDeviceGetTopologyCommonAncestor(Device *device, Device *other, int *level) {
    BEGIN(device, "ancestor");
    *level = device->ancestor[other - gpus];
    return *level < 0 ? NOT_SUPPORTED : SUCCESS;
}

#ifndef OLD_NVML
int nvmlDeviceGetRemappedRows(
    Device *device, unsigned *correctable, unsigned *uncorrectable, unsigned *pending, unsigned *failed
) {
    BEGIN(device, "rows");
    if (device->rows[0] < 0) return NOT_SUPPORTED;
    *correctable = *uncorrectable = 0;
    *pending = (unsigned)device->rows[0];
    *failed = (unsigned)device->rows[1];
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *reasons) {
    BEGIN(device, "reasons");
    return give_reasons(device, reasons);
}

int nvmlDeviceGetMemoryAffinity(Device *device, unsigned size, unsigned long *nodes, unsigned scope) {
    (void)scope;
    BEGIN(device, "memory");
    return give_mask(nodes, size, &device->memory);
}

int nvmlDeviceGetNumaNodeId(Device *device, int *node) {
    BEGIN(device, "numa_node");
    if (device->numa_node < -1) return NOT_SUPPORTED;
    *node = device->numa_node;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(Device *device, unsigned link, int *type) {
    BEGIN(device, "nvlink_type");
    if (link >= MAX_LINKS || device->far_end[link] < 0) return INVALID_ARGUMENT;
    *type = device->far_end[link];
    return SUCCESS;
}
#endif
