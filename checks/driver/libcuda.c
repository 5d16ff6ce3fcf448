/* A libcuda.so.1 without a GPU: it has the functions that Triton calls to load a kernel, to encode a tensor map and to
   launch. It refuses what the driver's documentation refuses, notes the rest as lines of JSON, and runs nothing. Built
   with QUIET it notes nothing and looks at no launch, so that what a host takes for one can be measured without it.

   What it knows of a kernel it reads from the cubin, as the driver does. The rules of tensor maps are those of cuda.h,
   and how many blocks are resident is computed by NVIDIA's cuda_occupancy.h; both come with Triton. */
#include <cuda.h>
#include <cuda_occupancy.h>
#include <elf.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAXIMUM_PARAMETERS = 256, DEFAULT_SHARED = 49152 };
enum { THREADS = 0x10, PARAMETER = 0x17, REGISTERS = 0x2f }; /* what a cubin says of a kernel */

struct CUfunc_st {
  char name[128];
  int registers, threads, parameters, sizes[MAXIMUM_PARAMETERS], shared_limit;
};

long launches, maps; /* how many this process has launched and encoded */
static cudaOccDeviceProp device;
static char reason[512], notes[1 << 20]; /* a launch takes a few kilobytes, and stub.py takes them at once */
static size_t noted;

#ifdef QUIET
#define note(...) ((void)0)
#else
#define note(...) (noted += snprintf(notes + noted, sizeof notes - noted, __VA_ARGS__))
#endif
#define refuse(error, ...) (snprintf(reason, sizeof reason, __VA_ARGS__), error)
#define REQUIRE(condition, ...) if (!(condition)) return refuse(CUDA_ERROR_INVALID_VALUE, __VA_ARGS__)

/* What stub.py calls: which GPU this is, and what has been noted since the last call. Each block has 1024 reserved
   bytes of shared memory; cubins from sm_90 on list the same bytes as static, which are not counted again. */
void describe(int capability, int processors, int shared_of_block, int shared_of_processor) {
  device = (cudaOccDeviceProp){
      .computeMajor = capability / 10, .computeMinor = capability % 10, .maxThreadsPerBlock = 1024,
      .maxThreadsPerMultiprocessor = 2048, .regsPerBlock = 65536, .regsPerMultiprocessor = 65536, .warpSize = 32,
      .sharedMemPerBlock = DEFAULT_SHARED, .sharedMemPerMultiprocessor = shared_of_processor, .numSms = processors,
      .sharedMemPerBlockOptin = shared_of_block, .reservedSharedMemPerBlock = 1024};
}

const char *take_notes(void) {
  notes[noted] = 0;
  noted = 0;
  return notes;
}

CUresult cuGetErrorString(CUresult error, const char **text) { *text = reason; return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *found, int ordinal) { *found = ordinal; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice of) { return cuCtxGetCurrent(context); }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)&device; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *found) { *found = 0; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { *status = 0; return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice of) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? device.sharedMemPerBlockOptin
           : attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR ? device.sharedMemPerMultiprocessor
           : attribute == CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK ? device.regsPerBlock
           : attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT ? device.numSms
           : attribute == CU_DEVICE_ATTRIBUTE_WARP_SIZE ? device.warpSize : 1; /* clocks and the width of the bus */
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  if (memcmp(image, ELFMAG, SELFMAG)) return refuse(CUDA_ERROR_INVALID_IMAGE, "the image is no ELF file");
  *module = (CUmodule)image; /* cuModuleGetFunction reads it at once */
  return CUDA_SUCCESS;
}

/* Sections .nv.info and .nv.info.NAME are lists: format, kind, 16 bits of value or size, with format 4 also bytes. */
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  const char *image = (const char *)module;
  const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
  const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
  const char *names = image + sections[header->e_shstrndx].sh_offset;
  CUfunction made = *function = calloc(1, sizeof *made);
  snprintf(made->name, sizeof made->name, "%s", name);
  made->shared_limit = DEFAULT_SHARED;
  for (int i = 0; i < header->e_shnum; i++) {
    const char *section = names + sections[i].sh_name;
    bool own = !strncmp(section, ".nv.info.", 9) && !strcmp(section + 9, name);
    if (!own && strcmp(section, ".nv.info")) continue;
    const unsigned char *at = (const unsigned char *)image + sections[i].sh_offset, *end = at + sections[i].sh_size;
    while (at < end) {
      unsigned words[3] = {0}, size = at[0] == 4 ? at[2] | at[3] << 8 : 0;
      memcpy(words, at + 4, size < sizeof words ? size : sizeof words);
      if (at[1] == REGISTERS && (int)words[1] > made->registers) made->registers = words[1];
      if (at[1] == THREADS && own) made->threads = words[0] * words[1] * words[2];
      if (at[1] == PARAMETER && own) { /* words: index, number and offset, then flags with the size from bit 18 on */
        int number = words[1] & 0xffff;
        if (number >= MAXIMUM_PARAMETERS) abort();
        made->sizes[number] = words[2] >> 18;
        if (number >= made->parameters) made->parameters = number + 1;
      }
      at += 4 + size;
    }
  }
  bool known = made->registers && made->threads;
  return known ? CUDA_SUCCESS : refuse(CUDA_ERROR_NOT_FOUND, "the module does not describe a kernel %s", name);
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? function->registers
           : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? function->threads : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  REQUIRE(attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && value <= (int)device.sharedMemPerBlockOptin,
          "attribute %d of a kernel is not known here, or cannot be %d", attribute, value);
  function->shared_limit = value;
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  static const int SWIZZLE_BYTES[] = {INT_MAX, 32, 64, 128}; /* of CUtensorMapSwizzle */
  int itemsize = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  maps++;
  REQUIRE(device.computeMajor >= 9, "sm_%d%d has no tensor maps", device.computeMajor, device.computeMinor);
  REQUIRE((size_t)map % 64 == 0, "a tensor map lies at %p, no multiple of 64", (void *)map);
  REQUIRE(type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || itemsize != 2,
          "a tensor map has elements of type %d, which is not known here", type);
  REQUIRE((rank == 2 || rank == 3) && interleave == 0 && swizzle >= 0 && swizzle < 4 && fill == 0,
          "%u dims, interleave %d, swizzle %d or fill %d is not known here", rank, interleave, swizzle, fill);
  REQUIRE(address && (size_t)address % 16 == 0, "a tensor map begins at %p, no multiple of 16", address);
  for (int i = 0; i < (int)rank - 1; i++)
    REQUIRE(strides[i] % 16 == 0 && strides[i] < 1ull << 40, "%s %llu bytes apart, no multiple of 16 below 2^40",
            i ? "matrices" : "rows", (unsigned long long)strides[i]);
  for (int i = 0; i < (int)rank; i++) {
    REQUIRE(steps[i] == 1, "every element of dim %d counts, not every %u-th", i, steps[i]);
    REQUIRE(dims[i] >= 1 && dims[i] <= 1ull << 32, "dim %d has %llu elements", i, (unsigned long long)dims[i]);
    REQUIRE(box[i] >= 1 && box[i] <= 256, "a box has 1 to 256 elements in dim %d, not %u", i, box[i]);
  }
  int row = box[0] * itemsize;
  REQUIRE(row % 16 == 0 && row <= SWIZZLE_BYTES[swizzle], "a row of a box has %d bytes, the swizzle %d", row,
          SWIZZLE_BYTES[swizzle]);
  memset(map, 0, sizeof *map);
  /* a launch's parameter shows what its map is of, first the address */
  cuuint64_t words[13] = {(cuuint64_t)address, type, swizzle, promotion, rank};
  char sizes[128], boxes[64], apart[64];
  int n = 0, m = 0, k = 0;
  for (int i = 0; i < (int)rank; i++) {
    words[5 + i] = dims[i], words[8 + i] = box[i];
    n += snprintf(sizes + n, sizeof sizes - n, "%s%llu", i ? ", " : "", (unsigned long long)dims[i]);
    m += snprintf(boxes + m, sizeof boxes - m, "%s%u", i ? ", " : "", box[i]);
  }
  for (int i = 0; i < (int)rank - 1; i++) {
    words[11 + i] = strides[i];
    k += snprintf(apart + k, sizeof apart - k, "%s%llu", i ? ", " : "", (unsigned long long)strides[i]);
  }
  memcpy(map->opaque, words, sizeof words);
  note("{\"map\": %llu, \"type\": %d, \"swizzle\": %d, \"dims\": [%s], \"strides\": [%s], \"box\": [%s]}\n",
       (unsigned long long)address, type, swizzle, sizes, apart, boxes);
  return CUDA_SUCCESS;
}

/* How many blocks are resident on all SMs at once. */
static unsigned long long resident(CUfunction function, int threads, int shared) {
  cudaOccFuncAttributes attributes = {.maxThreadsPerBlock = device.maxThreadsPerBlock, .numRegs = function->registers,
                                      .shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN, .numBlockBarriers = 1,
                                      .maxDynamicSharedSizeBytes = function->shared_limit};
  cudaOccDeviceState state = {.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED};
  cudaOccResult result = {0};
  if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &attributes, &state, threads, shared)) abort();
  return result.activeBlocksPerMultiprocessor * device.numSms;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **values, void **extra) {
  unsigned long long x = config->gridDimX, y = config->gridDimY, z = config->gridDimZ;
  int threads = config->blockDimX * config->blockDimY * config->blockDimZ, shared = config->sharedMemBytes;
  bool cooperative = false;
  for (unsigned i = 0; i < config->numAttrs; i++) {
    REQUIRE(config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE, "an attribute of the launch is not known here");
    cooperative = config->attrs[i].value.cooperative;
  }
  REQUIRE(x && y && z && x <= INT_MAX && y <= 65535 && z <= 65535, "no grid has %llu x %llu x %llu blocks", x, y, z);
  REQUIRE(threads == function->threads && threads <= 1024, "%s is compiled for %d threads, not %d", function->name,
          function->threads, threads);
  REQUIRE(shared <= function->shared_limit, "a block of %s may have %d bytes of shared memory, not %d", function->name,
          function->shared_limit, shared);
  launches++;
#ifdef QUIET
  return CUDA_SUCCESS;
#endif
  unsigned long long blocks = resident(function, threads, shared);
  if (!blocks) return refuse(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "no block of %s fits", function->name);
  if (cooperative && x * y * z > blocks)
    return refuse(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "of %llu cooperative blocks of %s %llu are resident at once",
                  x * y * z, function->name, blocks);
  note("{\"launch\": \"%s\", \"function\": %llu, \"grid\": [%llu, %llu, %llu], \"threads\": %d, \"shared\": %d, "
       "\"cooperative\": %s, \"resident\": %llu, \"taken\": [", function->name, (unsigned long long)function, x, y, z,
       threads, shared, cooperative ? "true" : "false", blocks);
  for (int i = 0; i < function->parameters; i++) { /* size and value; of a tensor map its address */
    unsigned long long value = 0;
    memcpy(&value, values[i], function->sizes[i] < 8 ? function->sizes[i] : 8);
    note("%s[%d, %llu]", i ? ", " : "", function->sizes[i], value);
  }
  note("], \"maps\": [");
  for (int i = 0, shown = 0; i < function->parameters; i++) {
    if (function->sizes[i] != sizeof(CUtensorMap)) continue;
    unsigned long long words[sizeof(CUtensorMap) / 8];
    memcpy(words, values[i], sizeof words);
    note("%s[%llu", shown++ ? ", " : "", words[0]);
    for (size_t word = 1; word < sizeof words / sizeof *words; word++) note(", %llu", words[word]);
    note("]");
  }
  note("]}\n");
  return CUDA_SUCCESS;
}
