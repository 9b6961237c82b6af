// A CUDA driver on the host's memory, as `libcuda.so.1`, for the real cuda-python and pycuda.
//
// It is as strict as a driver may be: copies, fills and gathers happen when something waits for
// them; calls without a current context fail; while a graph is recorded, calls that may not be
// captured fail and invalidate it. `stub_fail_at` lets one call fail, `stub_stop_at` also all work
// after it.
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Status;
typedef uint64_t Address;
enum {
  SUCCESS = 0,
  OUT_OF_MEMORY = 2,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  NOT_FOUND = 500,
  LAUNCH_FAILED = 719,
  NOT_CAPTURED = 900,
  INVALIDATED = 901
};
enum { COPY, FILL, GATHER, KERNEL };
enum { MOST_WORK = 1 << 16, MOST_CALLS = 1 << 16, NON_BLOCKING = 1 };
static void *const CONTEXT = (void *)0x1000, *const STREAM = (void *)0x7000;
static const size_t GPU_BYTES = (size_t)1 << 30;

typedef struct {
  int kind;
  void *target;
  const void *source;
  size_t size;
  int value;
  const int32_t *rows;
  unsigned count;
} Work;
typedef struct {
  int count;
  Work *work;
} Graph;

static Work queue[MOST_WORK], recorded[MOST_WORK];
static const char *calls[MOST_CALLS];
static int num_queued, num_recorded, num_calls, fails_at = -1, has_stopped, stops;
static int is_capturing, is_valid;
static int num_alive, num_retained;
static __thread int depth;

// ------------------------------------------------------------------------------- for the tests
void stub_fail_at(int call) {
  fails_at = call;
  num_calls = num_queued = has_stopped = stops = 0;
}
void stub_stop_at(int call) {
  stub_fail_at(call);
  stops = 1;
}
int stub_num_calls(void) { return num_calls; }
const char *stub_call(int index) { return calls[index]; }
int stub_depth(void) { return depth; }
int stub_alive(void) { return num_alive; }
int stub_retained(void) { return num_retained; }

// ------------------------------------------------------------------------------------- the rules
enum { ANYWHERE = 0, IN_CONTEXT = 1, OUTSIDE_CAPTURE = 2 };

static Status begin(const char *name, int rules) {
  const int at = num_calls++;
  if (at < MOST_CALLS) calls[at] = name;
  has_stopped |= stops && at == fails_at;
  if (at == fails_at || (has_stopped && (rules & IN_CONTEXT))) {
    if (is_capturing) is_valid = 0;
    return LAUNCH_FAILED;
  }
  if ((rules & IN_CONTEXT) && !depth) return INVALID_CONTEXT;
  if ((rules & OUTSIDE_CAPTURE) && is_capturing) {
    is_valid = 0;
    return NOT_CAPTURED;
  }
  return SUCCESS;
}
#define BEGIN(rules)                                  \
  do {                                                \
    const Status status_ = begin(__func__, (rules)); \
    if (status_) return status_;                      \
  } while (0)

static void run(const Work *work) {
  if (work->kind == COPY) memcpy(work->target, work->source, work->size);
  if (work->kind == FILL) memset(work->target, work->value, work->size);
  if (work->kind == GATHER) {
    for (unsigned row = 0; row < work->count; row++) {
      memcpy((char *)work->target + row * work->size,
             (const char *)work->source + (size_t)work->rows[row] * work->size, work->size);
    }
  }
}
static void wait_for_all(void) {
  for (int at = 0; at < num_queued; at++) run(&queue[at]);
  num_queued = 0;
}
static Status add(Work work, const void *stream) {
  if (stream != STREAM) return INVALID_CONTEXT;  // the legacy stream has no order with ours
  if (is_capturing) {
    recorded[num_recorded++] = work;
  } else {
    queue[num_queued++] = work;
  }
  return SUCCESS;
}

// ------------------------------------------------------------------------- device and context
Status cuInit(unsigned flags) {
  (void)flags;
  BEGIN(ANYWHERE);
  const char *given = getenv("STUB_INIT");
  return given ? atoi(given) : SUCCESS;
}
Status cuGetErrorString(Status status, const char **text) {
  (void)status;
  *text = "a fault of the stub";
  return SUCCESS;
}
static int driver_version(void) {
  const char *given = getenv("STUB_CUDA");
  return given ? atoi(given) : 13000;
}
Status cuDriverGetVersion(int *version) {
  *version = driver_version();
  return SUCCESS;
}
Status cuDeviceGet(int *device, int index) {
  BEGIN(ANYWHERE);
  *device = 0;
  return index ? INVALID_DEVICE : SUCCESS;
}
Status cuDeviceGetName(char *name, int size, int device) {
  (void)device;
  BEGIN(ANYWHERE);
  snprintf(name, (size_t)size, "a stub");
  return SUCCESS;
}
static int capability(void) {
  const char *given = getenv("STUB_SM");
  return given ? atoi(given) : 110;
}
Status cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  BEGIN(ANYWHERE);
  *value = attribute == 75 ? capability() / 10 : attribute == 76 ? capability() % 10 : 1;
  return SUCCESS;
}
Status cuDeviceComputeCapability(int *major, int *minor, int device) {
  (void)device;
  BEGIN(ANYWHERE);
  *major = capability() / 10, *minor = capability() % 10;
  return SUCCESS;
}
Status cuDeviceTotalMem_v2(size_t *size, int device) {
  (void)device;
  BEGIN(ANYWHERE);
  const char *given = getenv("STUB_GIB");
  *size = (given ? strtoull(given, NULL, 10) : 128) << 30;
  return SUCCESS;
}
Status cuDevicePrimaryCtxRetain(void **context, int device) {
  (void)device;
  BEGIN(ANYWHERE);
  num_retained++;
  *context = CONTEXT;
  return SUCCESS;
}
Status cuDevicePrimaryCtxRelease_v2(int device) {
  (void)device;
  BEGIN(ANYWHERE);
  num_retained--;
  return SUCCESS;
}
Status cuCtxPushCurrent_v2(void *context) {
  BEGIN(ANYWHERE);
  if (context != CONTEXT) return INVALID_CONTEXT;
  depth++;
  return SUCCESS;
}
Status cuCtxPopCurrent_v2(void **context) {
  BEGIN(ANYWHERE);
  if (!depth) return INVALID_CONTEXT;
  depth--;
  *context = CONTEXT;
  return SUCCESS;
}
Status cuCtxDetach(void *context) {
  (void)context;
  BEGIN(ANYWHERE);
  return INVALID_CONTEXT;  // of a primary context
}
Status cuCtxSynchronize(void) {
  BEGIN(IN_CONTEXT | OUTSIDE_CAPTURE);
  wait_for_all();
  return SUCCESS;
}

// --------------------------------------------------------------------------------------- memory
Status cuMemAlloc_v2(Address *address, size_t size) {
  BEGIN(IN_CONTEXT | OUTSIDE_CAPTURE);
  void *found;
  if (size > GPU_BYTES || posix_memalign(&found, 256, size)) return OUT_OF_MEMORY;
  memset(found, 0xA5, size);
  num_alive++;
  *address = (Address)(uintptr_t)found;
  return SUCCESS;
}
static Status pin(void **address, size_t size) {
  if (posix_memalign(address, 4096, size)) return OUT_OF_MEMORY;
  num_alive++;
  return SUCCESS;
}
Status cuMemAllocHost_v2(void **address, size_t size) {
  BEGIN(IN_CONTEXT | OUTSIDE_CAPTURE);
  return pin(address, size);
}
Status cuMemHostAlloc(void **address, size_t size, unsigned flags) {
  BEGIN(IN_CONTEXT | OUTSIDE_CAPTURE);
  return flags ? NOT_FOUND : pin(address, size);
}
static Status release(void *address) {
  wait_for_all();
  free(address);
  num_alive--;
  return SUCCESS;
}
Status cuMemFree_v2(Address address) {
  BEGIN(IN_CONTEXT | OUTSIDE_CAPTURE);
  return release((void *)(uintptr_t)address);
}
Status cuMemFreeHost(void *address) {
  BEGIN(IN_CONTEXT | OUTSIDE_CAPTURE);
  return release(address);
}
Status cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  BEGIN(IN_CONTEXT);
  *free_bytes = *total = GPU_BYTES;
  return SUCCESS;
}
Status cuMemsetD8Async(Address target, unsigned char value, size_t size, void *stream) {
  BEGIN(IN_CONTEXT);
  const Work work = {.kind = FILL, .target = (void *)(uintptr_t)target, .size = size, .value = value};
  return add(work, stream);
}
static Status copy(void *target, const void *source, size_t size, void *stream) {
  const Work work = {.kind = COPY, .target = target, .source = source, .size = size};
  return add(work, stream);
}
Status cuMemcpyHtoDAsync_v2(Address target, const void *source, size_t size, void *stream) {
  BEGIN(IN_CONTEXT);
  return copy((void *)(uintptr_t)target, source, size, stream);
}
Status cuMemcpyDtoHAsync_v2(void *target, Address source, size_t size, void *stream) {
  BEGIN(IN_CONTEXT);
  return copy(target, (const void *)(uintptr_t)source, size, stream);
}
Status cuMemcpyDtoDAsync_v2(Address target, Address source, size_t size, void *stream) {
  BEGIN(IN_CONTEXT);
  return copy((void *)(uintptr_t)target, (const void *)(uintptr_t)source, size, stream);
}
typedef struct {
  size_t x, y;
  unsigned kind;
  void *host;
  Address device;
  void *array;
  size_t pitch;
} Side;
typedef struct {
  Side source, target;
  size_t width, height;
} Planes;
static char *start(const Side *side) {
  char *base = side->kind == 1 ? side->host : (char *)(uintptr_t)side->device;
  return base + side->y * side->pitch + side->x;
}
Status cuMemcpy2DAsync_v2(const Planes *planes, void *stream) {
  BEGIN(IN_CONTEXT);
  Status status = SUCCESS;
  for (size_t row = 0; row < planes->height && !status; row++) {
    status = copy(start(&planes->target) + row * planes->target.pitch,
                  start(&planes->source) + row * planes->source.pitch, planes->width, stream);
  }
  return status;
}

// ------------------------------------------------------------------------- streams and kernels
Status cuStreamCreate(void **stream, unsigned flags) {
  BEGIN(IN_CONTEXT | OUTSIDE_CAPTURE);
  if (flags != NON_BLOCKING) return NOT_FOUND;
  *stream = STREAM;
  return SUCCESS;
}
Status cuStreamDestroy_v2(void *stream) {
  BEGIN(IN_CONTEXT);
  return stream == STREAM ? SUCCESS : NOT_FOUND;
}
Status cuStreamSynchronize(void *stream) {
  (void)stream;
  BEGIN(IN_CONTEXT | OUTSIDE_CAPTURE);
  wait_for_all();
  return SUCCESS;
}
typedef struct {
  char name[256];
  size_t bytes;  // of its arguments
} Function;
Status cuModuleLoadData(void **module, const void *text) {
  BEGIN(IN_CONTEXT | OUTSIDE_CAPTURE);
  *module = strdup(text);
  return SUCCESS;
}
Status cuModuleLoadDataEx(void **module, const void *text, unsigned count, const int *options, void **values) {
  for (unsigned at = 0; at < count; at++) {
    if (options[at] == 4 || options[at] == 6) values[at] = NULL;  // bytes written to the logs
  }
  BEGIN(IN_CONTEXT | OUTSIDE_CAPTURE);
  *module = strdup(text);
  return SUCCESS;
}
Status cuModuleUnload(void *module) {
  BEGIN(IN_CONTEXT | OUTSIDE_CAPTURE);
  free(module);
  return SUCCESS;
}
static size_t argument_bytes(const char *text) {
  size_t bytes = 0;
  const char *const end = strchr(text, ')');
  while ((text = strstr(text, ".param")) && text < end) {
    text += strcspn(text, "0123456789");  // of the type, .u64
    const size_t size = strtoul(text, NULL, 10) / 8;
    bytes = (bytes + size - 1) / size * size + size;
  }
  return bytes;
}
Status cuModuleGetFunction(void **function, void *module, const char *name) {
  BEGIN(IN_CONTEXT);
  char entry[512];
  snprintf(entry, sizeof entry, ".entry %s(", name);
  const char *const found = strstr(module, entry);
  if (!found) return NOT_FOUND;
  Function *const made = malloc(sizeof *made);
  snprintf(made->name, sizeof made->name, "%s", name);
  made->bytes = argument_bytes(found);
  *function = made;
  return SUCCESS;
}
Status cuFuncSetBlockShape(const Function *function, int x, int y, int z) {
  (void)function;
  BEGIN(IN_CONTEXT);
  return x > 0 && y == 1 && z == 1 ? SUCCESS : NOT_FOUND;
}
Status cuLaunchKernel(const Function *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned block_y,
                      unsigned block_z, unsigned shared, void *stream, void **arguments, void **extra) {
  BEGIN(IN_CONTEXT);
  if (!x || !y || !z || !threads || block_y != 1 || block_z != 1 || shared > 48 << 10) return NOT_FOUND;
  if (!arguments == !extra) return NOT_FOUND;
  char *packed = NULL;
  for (int at = 0; extra && extra[at]; at += 2) {
    if ((uintptr_t)extra[at] == 1) packed = extra[at + 1];
    if ((uintptr_t)extra[at] == 2 && *(const size_t *)extra[at + 1] != function->bytes) return NOT_FOUND;
  }
  if (strcmp(function->name, "gather_rows")) return add((Work){.kind = KERNEL}, stream);
  void *places[4];  // all but the last argument have 8 bytes
  for (int at = 0; at < 4; at++) places[at] = extra ? packed + 8 * at : arguments[at];
  const Work work = {.kind = GATHER,
                     .target = *(void **)places[0],
                     .source = *(void **)places[1],
                     .rows = *(const int32_t **)places[2],
                     .size = 16 * (size_t) * (const uint32_t *)places[3],
                     .count = x};
  return add(work, stream);
}

// ---------------------------------------------------------------------------------------- graphs
Status cuStreamBeginCapture_v2(void *stream, int mode) {
  (void)mode;
  BEGIN(IN_CONTEXT | OUTSIDE_CAPTURE);
  if (stream != STREAM) return NOT_CAPTURED;
  is_capturing = is_valid = 1;
  num_recorded = 0;
  return SUCCESS;
}
Status cuStreamEndCapture(void *stream, Graph **graph) {
  (void)stream;
  const int was_capturing = is_capturing;
  is_capturing = 0;
  BEGIN(IN_CONTEXT);
  if (!was_capturing || !is_valid) return INVALIDATED;
  *graph = malloc(sizeof **graph);
  (*graph)->count = num_recorded;
  (*graph)->work = malloc(sizeof(Work) * (size_t)(num_recorded + 1));
  memcpy((*graph)->work, recorded, sizeof(Work) * (size_t)num_recorded);
  return SUCCESS;
}
Status cuGraphInstantiateWithFlags(void **executable, Graph *graph, unsigned long long flags) {
  (void)flags;
  BEGIN(IN_CONTEXT | OUTSIDE_CAPTURE);
  *executable = graph;
  return SUCCESS;
}
Status cuGraphDestroy(Graph *graph) {
  (void)graph;
  BEGIN(ANYWHERE);
  return SUCCESS;
}
Status cuGraphExecDestroy(void *executable) {
  (void)executable;
  BEGIN(IN_CONTEXT | OUTSIDE_CAPTURE);
  return SUCCESS;
}
Status cuGraphLaunch(const Graph *graph, void *stream) {
  BEGIN(IN_CONTEXT | OUTSIDE_CAPTURE);
  Status status = SUCCESS;
  for (int at = 0; at < graph->count && !status; at++) status = add(graph->work[at], stream);
  return status;
}

// ------------------------------------------------------------------------------ how it is found
Status cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *found) {
  (void)flags;
  static void *self;
  if (!self) self = dlopen("libcuda.so.1", RTLD_LAZY);
  const char *const endings[] = {"_v2", "", "WithFlags"};
  for (int at = 0; at < 3 && version <= driver_version(); at++) {
    char full[256];
    snprintf(full, sizeof full, "%s%s", name, endings[at]);
    if ((*function = dlsym(self, full))) {
      if (found) *found = 0;
      return SUCCESS;
    }
  }
  if (found) *found = 1;
  return NOT_FOUND;
}
Status cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
