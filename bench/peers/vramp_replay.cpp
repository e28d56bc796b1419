// vramp's C interface under the shared harness.
// g++ -O2 -std=c++17 vramp_replay.cpp -o vramp_replay -I../../crates/vramp-capi/include -I/usr/local/cuda/include
//   -L. -lvramp -L/usr/local/cuda/lib64 -lcudart -lpthread -Wl,-rpath,'$ORIGIN',-rpath,/usr/local/cuda/lib64
#include "replay_common.hpp"
#include "vramp.h"

struct Vramp {
  using Stream = vramp_stream_t;
  vramp_allocator_t allocator{};
  Vramp() {
    if (vramp_open("cuda", getenv("VRAMP_OPTIONS"), &allocator) != VRAMP_OK) { fprintf(stderr, "%s\n", vramp_last_error()); exit(3); }
  }
  ~Vramp() { vramp_close(allocator); }
  std::string name() const { return "vramp"; }
  Stream make_stream() {
    vramp_stream_t stream{};
    if (vramp_stream_adopt(allocator, replay::new_stream(), &stream) != VRAMP_OK) { fprintf(stderr, "%s\n", vramp_last_error()); exit(3); }
    return stream;
  }
  void thread_init() {}
  void* alloc(size_t n, Stream s) {
    void* p = nullptr;
    if (vramp_malloc(allocator, n, s, &p) == VRAMP_OK) return p;
    static int shown = 0; if (shown++ < 2) fprintf(stderr, "alloc %zu: %.300s\n", n, vramp_last_error());
    return nullptr;
  }
  void free(void* p, size_t, Stream s) { vramp_free(allocator, p, s); }
  vramp_stats_t stats() const { vramp_stats_t s{}; s.struct_size = sizeof s; vramp_stats(allocator, &s); return s; }
  int64_t reserved() { return (int64_t)stats().reserved; }
  int64_t reserved_peak() { return (int64_t)stats().reserved_peak; }
  void reset_peak() {}  // a pass's peak is that of all passes so far
};

int main(int argc, char** argv) {
  replay::init_context();
  Vramp b;
  return replay::main_with(b, argc, argv);
}
