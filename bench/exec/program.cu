// A CUDA program without vramp, for measurements of `vramp exec` (costs.py runs it).
//
//   program loop BYTES COUNT        cudaMalloc and cudaFree in turn: ns a pair
//   program async BYTES COUNT       cudaMallocAsync and cudaFreeAsync in turn: ns a pair
//   program churn SECONDS SEED      random requests on four streams and two threads, every byte checked
//   program fragments PERCENT       fills so much of the card with blocks a little above 2 MiB, and checks them
//   program work SECONDS GIB        adds to every word of so much memory again and again, and checks it at the end
//   program idle                    ns of waits for a device without work
//   program info                    free and total memory
//   program contexts                a second context, a reset, and work after each
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#define CHECK(call)                                                                             \
  do {                                                                                          \
    cudaError_t checked = (call);                                                               \
    if (checked != cudaSuccess) {                                                               \
      std::printf("%s: %s\n", #call, cudaGetErrorString(checked));                              \
      std::exit(3);                                                                             \
    }                                                                                           \
  } while (0)

using Clock = std::chrono::steady_clock;

static double ns_since(Clock::time_point start) {
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

__global__ void fill(unsigned long long* words, size_t count, unsigned long long value) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
    words[i] = value + i;
}

__global__ void compare(const unsigned long long* words, size_t count, unsigned long long value, unsigned* wrong) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
    if (words[i] != value + i) atomicAdd(wrong, 1u);
}

static void loop(size_t bytes, int count, bool is_async) {
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  for (int round = 0; round < 2; ++round) {
    auto start = Clock::now();
    for (int i = 0; i < count; ++i) {
      void* block;
      if (is_async) {
        CHECK(cudaMallocAsync(&block, bytes, stream));
        CHECK(cudaFreeAsync(block, stream));
      } else {
        CHECK(cudaMalloc(&block, bytes));
        CHECK(cudaFree(block));
      }
    }
    if (round) std::printf("{\"ns\": %.1f}\n", ns_since(start) / count);
    CHECK(cudaStreamSynchronize(stream));
  }
}

struct Block {
  unsigned long long* words;
  size_t count;
  unsigned long long value;
  bool is_async;
};

static void churn_thread(double seconds, unsigned seed, unsigned* wrong, size_t* done) {
  std::mt19937_64 random(seed);
  std::vector<cudaStream_t> streams(4);
  for (auto& stream : streams) CHECK(cudaStreamCreateWithFlags(&stream, random() % 2 ? cudaStreamNonBlocking : cudaStreamDefault));
  std::vector<std::vector<Block>> live(streams.size());
  auto start = Clock::now();
  while (ns_since(start) < seconds * 1e9) {
    size_t at = random() % streams.size();
    auto& blocks = live[at];
    if (blocks.empty() || (random() % 2 && blocks.size() < 40)) {
      size_t bytes = (size_t(1) << (9 + random() % 17)) + 8 * (random() % 1000);
      Block block{nullptr, bytes / 8, random(), random() % 2 == 0};
      if (block.is_async)
        CHECK(cudaMallocAsync(&block.words, bytes, streams[at]));
      else
        CHECK(cudaMalloc(&block.words, bytes));
      fill<<<64, 256, 0, streams[at]>>>(block.words, block.count, block.value);
      blocks.push_back(block);
    } else {
      size_t which = random() % blocks.size();
      Block block = blocks[which];
      blocks[which] = blocks.back();
      blocks.pop_back();
      compare<<<64, 256, 0, streams[at]>>>(block.words, block.count, block.value, wrong);
      if (block.is_async && random() % 8)
        CHECK(cudaFreeAsync(block.words, streams[at]));
      else {
        if (block.is_async) CHECK(cudaStreamSynchronize(streams[at]));
        CHECK(cudaFree(block.words));
      }
    }
    ++*done;
    if (random() % 500 == 0) {
      for (auto& block : blocks) {
        compare<<<64, 256, 0, streams[at]>>>(block.words, block.count, block.value, wrong);
        if (block.is_async)
          CHECK(cudaFreeAsync(block.words, streams[at]));
        else
          CHECK(cudaFree(block.words));
      }
      blocks.clear();
      CHECK(cudaStreamDestroy(streams[at]));
      CHECK(cudaStreamCreate(&streams[at]));
    }
  }
  CHECK(cudaDeviceSynchronize());
}

static void churn(double seconds, unsigned seed) {
  unsigned* wrong;
  CHECK(cudaMallocManaged(&wrong, sizeof *wrong));
  *wrong = 0;
  size_t done[2] = {0, 0};
  std::thread other(churn_thread, seconds, seed + 1, wrong, &done[1]);
  churn_thread(seconds, seed, wrong, &done[0]);
  other.join();
  CHECK(cudaDeviceSynchronize());
  std::printf("{\"wrong\": %u}\n", *wrong);
  std::fprintf(stderr, "%zu steps\n", done[0] + done[1]);
  if (*wrong) std::exit(4);
}

// The driver gives whole pages of 2 MiB: these blocks take twice their size of it.
static void fragments(double percent) {
  size_t free, total;
  CHECK(cudaMemGetInfo(&free, &total));
  const size_t piece = (size_t(2) << 20) + (size_t(64) << 10);
  size_t count = size_t(free * percent / 100) / piece;
  unsigned* wrong;
  CHECK(cudaMallocManaged(&wrong, sizeof *wrong));
  *wrong = 0;
  std::vector<unsigned long long*> pieces(count);
  for (size_t i = 0; i < count; ++i) {
    cudaError_t got = cudaMalloc(&pieces[i], piece);
    if (got == cudaErrorMemoryAllocation) {
      std::printf("{\"pieces\": %zu, \"of\": %zu, \"died\": true}\n", i, count);
      std::exit(1);
    }
    CHECK(got);
    fill<<<16, 256>>>(pieces[i], piece / 8, i);
  }
  for (size_t i = 0; i < count; ++i) compare<<<16, 256>>>(pieces[i], piece / 8, i, wrong);
  CHECK(cudaDeviceSynchronize());
  std::printf("{\"pieces\": %zu, \"of\": %zu, \"died\": false, \"wrong\": %u}\n", count, count, *wrong);
  if (*wrong) std::exit(4);
}

__global__ void add(unsigned long long* words, size_t count) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
    words[i] += 1;
}

static void work_for(double seconds, double gib) {
  const size_t piece = size_t(256) << 20;
  size_t count = size_t(gib * (size_t(1) << 30)) / piece;
  std::vector<unsigned long long*> pieces(count);
  std::vector<unsigned long long> rounds(count);
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  unsigned* wrong;
  CHECK(cudaMallocManaged(&wrong, sizeof *wrong));
  *wrong = 0;
  for (size_t i = 0; i < count; ++i) {
    CHECK(cudaMalloc(&pieces[i], piece));
    fill<<<256, 256, 0, stream>>>(pieces[i], piece / 8, i);
  }
  std::printf("ready\n");
  std::fflush(stdout);
  std::mt19937_64 random(1);
  auto start = Clock::now();
  double longest = 0;
  size_t steps = 0;
  while (ns_since(start) < seconds * 1e9) {
    auto step = Clock::now();
    size_t i = random() % count;
    add<<<256, 256, 0, stream>>>(pieces[i], piece / 8);
    ++rounds[i];
    void* scratch;
    CHECK(cudaMallocAsync(&scratch, 1 + random() % (size_t(8) << 20), stream));
    CHECK(cudaMemsetAsync(scratch, 1, 1, stream));
    CHECK(cudaFreeAsync(scratch, stream));
    if (random() % 16 == 0) CHECK(cudaStreamSynchronize(stream));
    if (random() % 64 == 0) {
      unsigned long long word;
      CHECK(cudaMemcpyAsync(&word, pieces[i] + 5, 8, cudaMemcpyDeviceToHost, stream));
      CHECK(cudaStreamSynchronize(stream));
      if (word != i + rounds[i] + 5) ++*wrong;
    }
    ++steps;
    longest = std::max(longest, ns_since(step));
  }
  CHECK(cudaStreamSynchronize(stream));
  for (size_t i = 0; i < count; ++i) compare<<<256, 256, 0, stream>>>(pieces[i], piece / 8, i + rounds[i], wrong);
  CHECK(cudaDeviceSynchronize());
  std::printf("{\"wrong\": %u, \"steps\": %zu, \"longest step ms\": %.1f, \"seconds\": %.2f}\n", *wrong, steps, longest / 1e6,
              ns_since(start) / 1e9);
  if (*wrong) std::exit(4);
}

static void idle() {
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  const int count = 20000;
  auto timed = [&](auto call) {
    auto start = Clock::now();
    for (int i = 0; i < count; ++i) call();
    return ns_since(start) / count;
  };
  double device = timed([] { CHECK(cudaDeviceSynchronize()); });
  double synchronize = timed([&] { CHECK(cudaStreamSynchronize(stream)); });
  double query = timed([&] { CHECK(cudaStreamQuery(stream)); });
  std::printf("{\"device synchronize\": %.0f, \"stream synchronize\": %.0f, \"stream query\": %.0f}\n", device, synchronize, query);
}

static void info() {
  size_t free, total;
  CHECK(cudaMemGetInfo(&free, &total));
  cudaDeviceProp card;
  CHECK(cudaGetDeviceProperties(&card, 0));
  std::printf("{\"free\": %zu, \"total\": %zu, \"card\": %zu}\n", free, total, card.totalGlobalMem);
}

#define DRIVER(call)                                                  \
  do {                                                                \
    CUresult code = (call);                                           \
    if (code != CUDA_SUCCESS) {                                       \
      std::printf("%s: %d\n", #call, int(code));                      \
      std::exit(3);                                                   \
    }                                                                 \
  } while (0)

static void work(const char* where) {
  unsigned long long* words;
  CHECK(cudaMalloc(&words, 1 << 20));
  CHECK(cudaMemset(words, 1, 1 << 20));
  unsigned long long first;
  CHECK(cudaMemcpy(&first, words, 8, cudaMemcpyDeviceToHost));
  cudaPointerAttributes attributes;
  CHECK(cudaPointerGetAttributes(&attributes, words + 3));
  CUdeviceptr base;
  size_t size;
  DRIVER(cuMemGetAddressRange(&base, &size, CUdeviceptr(words + 100)));
  CUcontext context;
  DRIVER(cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, CUdeviceptr(words)));
  CUcontext current;
  DRIVER(cuCtxGetCurrent(&current));
  std::printf("%s: %llx, type %d, device %d, base %d, size %zu, context %d\n", where, first, int(attributes.type),
              attributes.device, base == CUdeviceptr(words), size, context == current);
  CHECK(cudaFree(words));
  cudaError_t again = cudaFree(words);
  std::printf("%s: freed again: %s\n", where, cudaGetErrorString(again));
  (void)cudaGetLastError();
}

static void contexts() {
  work("primary");
  CUcontext primary, second;
  DRIVER(cuCtxGetCurrent(&primary));
#if CUDA_VERSION >= 13000
  DRIVER(cuCtxCreate(&second, nullptr, 0, 0));
#else
  DRIVER(cuCtxCreate(&second, 0, 0));
#endif
  CUdeviceptr words;
  DRIVER(cuMemAlloc(&words, 1 << 20));
  DRIVER(cuMemsetD8(words, 3, 1 << 20));
  unsigned char byte;
  DRIVER(cuMemcpyDtoH(&byte, words + 77, 1));
  DRIVER(cuMemFree(words));
  DRIVER(cuMemAlloc(&words, 1 << 20));
  DRIVER(cuCtxDestroy(second));
  DRIVER(cuCtxSetCurrent(primary));
  std::printf("second: %d\n", byte);
  // The driver waits for a free in relaxed mode while another thread captures.
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  for (auto mode : {cudaStreamCaptureModeRelaxed, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeGlobal}) {
    void *before, *within = nullptr;
    CHECK(cudaMalloc(&before, 4096));
    CHECK(cudaStreamBeginCapture(stream, mode));
    cudaError_t allocated = cudaMalloc(&within, 4096);
    cudaError_t freed = cudaFree(before);
    cudaGraph_t graph = nullptr;
    cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    std::printf("capture %d: malloc %d, free %d, end %d\n", int(mode), int(allocated), int(freed), int(ended));
    (void)cudaGetLastError();
    if (graph) CHECK(cudaGraphDestroy(graph));
    if (!allocated) CHECK(cudaFree(within));
  }
  CHECK(cudaStreamDestroy(stream));
  CHECK(cudaDeviceReset());
  work("after a reset");
}

int main(int count, char** words) {
  std::string what = count > 1 ? words[1] : "";
  auto number = [&](int at, double otherwise) { return count > at ? std::atof(words[at]) : otherwise; };
  CHECK(cudaFree(nullptr));
  if (what == "loop" || what == "async")
    loop(size_t(number(2, 1 << 26)), int(number(3, 1000)), what == "async");
  else if (what == "churn")
    churn(number(2, 5), unsigned(number(3, 1)));
  else if (what == "fragments")
    fragments(number(2, 90));
  else if (what == "work")
    work_for(number(2, 10), number(3, 1));
  else if (what == "idle")
    idle();
  else if (what == "info")
    info();
  else if (what == "contexts")
    contexts();
  else
    return std::printf("unknown: %s\n", what.c_str()), 2;
}
