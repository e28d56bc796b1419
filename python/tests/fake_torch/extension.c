/* In place of the compiled class: counts its installations. FAKE_INSTALL_FAILS makes them fail,
   FAKE_SELF_TEST_FAILS and FAKE_SELF_TEST_CRASHES its test. */
#include <stdlib.h>

int vramp_test_installed;

const char *vramp_torch_install(const char *library)
{
    const char *failure = getenv("FAKE_INSTALL_FAILS");
    if (failure != NULL || library == NULL || library[0] != '/') {
        return failure != NULL ? failure : "no path of the library";
    }
    vramp_test_installed++;
    return NULL;
}

int vramp_torch_self_test(void)
{
    if (getenv("FAKE_SELF_TEST_CRASHES") != NULL) {
        abort();
    }
    return getenv("FAKE_SELF_TEST_FAILS") != NULL;
}

void vramp_torch_ask_distributed(int (*ask)(void))
{
    (void)ask;
}
