// The program of RMM's tests: vramp is the current device's resource.
#include "rmm_tests.hpp"

#include <gmock/gmock.h>

int main(int argc, char **argv) {
    testing::InitGoogleMock(&argc, argv);
    rmm::mr::set_per_device_resource(rmm::cuda_device_id{0}, vramp_tests::shared());
    int failed = RUN_ALL_TESTS();
    rmm::mr::reset_per_device_resource(rmm::cuda_device_id{0});
    return failed;
}
