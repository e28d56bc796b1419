// The base class of RMM before 26.06. `cargo xtask rmm` compiles this with the headers of such versions.

#include <vramp/rmm.hpp>

#if __has_include(<rmm/mr/per_device_resource.hpp>)
#include <rmm/mr/per_device_resource.hpp>
#else
#include <rmm/mr/device/per_device_resource.hpp>
#endif

int main() {
    vramp::device_resource resource(0);
    vramp::device_memory_resource base(resource);
    rmm::mr::set_current_device_resource(&base);
    rmm::device_async_resource_ref reference(base);
    (void)reference;
    return base.get() == resource ? 0 : 1;
}
