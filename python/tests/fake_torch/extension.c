/* In place of the compiled class: counts its installations. FAKE_INSTALL_FAILS makes them fail. */
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
