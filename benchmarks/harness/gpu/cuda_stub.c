/* A CUDA runtime whose memory is the host's, whose kernels compute nothing, and that counts.

   For `cuda_calls.py`, which adds what other libraries' functions need. While a stream is recorded,
   what a GPU would refuse is refused: allocations, waits, copies that wait. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_runtime_api.h"

#undef cudaGetDeviceProperties

#define MOST_KERNELS 400000
#define REFUSED 900 /* cudaErrorStreamCaptureUnsupported */
#define GIB (1ull << 30)

enum { LAUNCHES, PRODUCTS, COPIES, REPLAYS, ALLOCATIONS, WAITS, REFUSALS, COUNTS };

static long counts[COUNTS];
static int is_recording;
static cudaError_t latest;
static struct { const void *place; const char *name; } kernels[MOST_KERNELS];
static int num_kernels;

void stub_counts(long *out) { memcpy(out, counts, sizeof counts); }

void stub_reset(void) { memset(counts, 0, sizeof counts); }

static int setting(const char *name, int usual) {
  const char *given = getenv(name);
  return given ? atoi(given) : usual;
}

static void show(const char *kind, const char *name) {
  if (setting("STUB_TRACE", 0)) fprintf(stderr, "%s %s\n", kind, name);
}

void stub_product(const char *name) {
  counts[PRODUCTS]++;
  show("product", name);
}

static cudaError_t refuse(const char *name) {
  show("refused", name);
  counts[REFUSALS]++;
  return latest = REFUSED;
}

#define NOT_RECORDED(name) \
  do {                     \
    if (is_recording) return refuse(name); \
  } while (0)

static cudaError_t launch(const void *kernel) {
  counts[LAUNCHES]++;
  if (setting("STUB_TRACE", 0))
    for (int at = num_kernels - 1; at >= 0; at--)
      if (kernels[at].place == kernel) {
        show("launch", kernels[at].name);
        break;
      }
  return 0;
}

/* ------------------------------------------------------------------ kernels and their launches */
void **__cudaRegisterFatBinary(void *binary) {
  static void *handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterVar(void **h, char *v, char *d, const char *n, int e, size_t s, int c, int g) {}
void __cudaRegisterFunction(void **handle, const char *place, char *device, const char *name, int t,
                            void *a, void *b, void *c, void *d, int *w) {
  if (num_kernels == MOST_KERNELS) return;
  kernels[num_kernels].place = place;
  kernels[num_kernels++].name = name;
}

static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
  *(void **)stream = pushed.stream;
  return 0;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *place) {
  *kernel = (cudaKernel_t)place;
  return 0;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t s, cudaStream_t t) {
  return launch(k);
}
cudaError_t cudaLaunchKernel(const void *k, dim3 g, dim3 b, void **a, size_t s, cudaStream_t t) {
  return launch(k);
}
cudaError_t cudaLaunchCooperativeKernel(const void *k, dim3 g, dim3 b, void **a, size_t s,
                                        cudaStream_t t) {
  return launch(k);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *k, void **a) {
  return launch(k);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) {
  if (!is_recording) call(data);
  return 0;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *kernel) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024, found->numRegs = 64, found->binaryVersion = setting("STUB_SM", 89);
  return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *k, int b,
                                                                   size_t s, unsigned f) {
  *blocks = 2;
  return 0;
}

/* ------------------------------------------------------------------------------------ the GPU */
static int most_shared(void) { return setting("STUB_SM", 89) == 90 ? 232448 : 101376; }

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  int sm = setting("STUB_SM", 89);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = sm / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = sm % 10; break;
    case cudaDevAttrMultiProcessorCount: *value = 66; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = most_shared(); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = most_shared() + 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 1536; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 1;
  }
  return 0;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
  int sm = setting("STUB_SM", 89);
  memset(found, 0, sizeof *found);
  strcpy(found->name, "stub");
  found->major = sm / 10, found->minor = sm % 10, found->warpSize = 32;
  found->totalGlobalMem = 16 * GIB, found->l2CacheSize = 50 << 20;
  found->multiProcessorCount = 66, found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = 1536;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->sharedMemPerBlock = 49152, found->sharedMemPerBlockOptin = most_shared();
  found->sharedMemPerMultiprocessor = most_shared() + 1024;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024, found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647, found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->concurrentKernels = found->unifiedAddressing = found->cooperativeLaunch = 1;
  return 0;
}
cudaError_t cudaGetDevice(int *device) { return *device = 0; }
cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, 0; }
cudaError_t cudaDriverGetVersion(int *version) { return *version = 13000, 0; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = 13000, 0; }
const char *cudaGetErrorName(cudaError_t error) { return "a stub's error"; }
const char *cudaGetErrorString(cudaError_t error) {
  return error == REFUSED ? "operation not permitted when stream is capturing" : "a stub's error";
}
cudaError_t cudaPeekAtLastError(void) { return latest; }
cudaError_t cudaGetLastError(void) {
  cudaError_t error = latest;
  latest = 0;
  return error;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **place, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
  *place = NULL;
  if (found) *found = cudaDriverEntryPointSymbolNotFound;
  return 0;
}

/* -------------------------------------------------------------------------------------- memory */
static cudaError_t allocated(void **place, size_t size) {
  counts[ALLOCATIONS]++;
  return posix_memalign(place, 256, size ? size : 1) ? cudaErrorMemoryAllocation : 0;
}
cudaError_t cudaMalloc(void **place, size_t size) {
  NOT_RECORDED("cudaMalloc");
  return allocated(place, size);
}
cudaError_t cudaHostAlloc(void **place, size_t size, unsigned flags) {
  NOT_RECORDED("cudaHostAlloc");
  return allocated(place, size);
}
cudaError_t cudaMallocHost(void **place, size_t size) {
  NOT_RECORDED("cudaMallocHost");
  return allocated(place, size);
}
cudaError_t cudaMallocFromPoolAsync(void **place, size_t size, cudaMemPool_t p, cudaStream_t s) {
  return allocated(place, size);
}
cudaError_t cudaFree(void *place) {
  NOT_RECORDED("cudaFree");
  free(place);
  return 0;
}
cudaError_t cudaFreeAsync(void *place, cudaStream_t stream) { return free(place), 0; }
cudaError_t cudaFreeHost(void *place) { return free(place), 0; }
cudaError_t cudaMemGetInfo(size_t *left, size_t *all) { return *left = 12 * GIB, *all = 16 * GIB, 0; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr which, void *value) {
  return *(unsigned long long *)value = 0;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
  NOT_RECORDED("cudaMemcpy");
  counts[COPIES]++;
  memcpy(to, from, size);
  return 0;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  counts[COPIES]++;
  memmove(to, from, size);
  return 0;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind k, cudaStream_t s) {
  counts[COPIES]++;
  for (size_t row = 0; row < height; row++)
    memcpy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
  return 0;
}
cudaError_t cudaMemset(void *to, int value, size_t size) {
  NOT_RECORDED("cudaMemset");
  memset(to, value, size);
  return 0;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
  memset(to, value, size);
  return 0;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *place) {
  memset(found, 0, sizeof *found);
  found->type = cudaMemoryTypeDevice, found->devicePointer = (void *)place;
  return 0;
}

/* -------------------------------------------------------------------- streams, events, graphs */
static cudaError_t waited(const char *name) {
  NOT_RECORDED(name);
  counts[WAITS]++;
  return 0;
}
cudaError_t cudaDeviceSynchronize(void) { return waited("cudaDeviceSynchronize"); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return waited("cudaStreamSynchronize"); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return waited("cudaEventSynchronize"); }
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return *stream = malloc(8), 0; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { return *s = malloc(8), 0; }
cudaError_t cudaEventCreate(cudaEvent_t *event) { return *event = malloc(8), 0; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { return *e = malloc(8), 0; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { return *ms = 1, 0; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  if (setting("STUB_RECORDS_NOTHING", 0)) return latest = REFUSED;
  is_recording = 1;
  return 0;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  is_recording = 0;
  *graph = (cudaGraph_t)8;
  return 0;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = is_recording ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return 0;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t g, unsigned long long flags) {
  return *made = (cudaGraphExec_t)8, 0;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  counts[REPLAYS]++;
  return 0;
}
