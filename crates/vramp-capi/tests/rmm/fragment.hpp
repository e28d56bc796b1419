// What the fragments of docs/cpp.md name. `cargo xtask rmm` appends the code of one, and the end of the function.
#include <vramp/rmm.hpp>

#include <rmm/device_uvector.hpp>

#include <cuda_runtime_api.h>
#include <vector>

bool drop_something(std::uint64_t);
extern cudaStream_t stream;
extern std::size_t bytes;
extern rmm::device_uvector<double> column;
struct names {
    vramp::device_resource resource;
};
struct fragment : names {
    void run();
};
void fragment::run() {
