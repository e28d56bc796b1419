#!/bin/sh
# Stands for rustdoc in `cargo test --doc`: documents each crate before its examples run, so that links
# are checked with the libraries that the tests have built. `cargo doc` would check all of them anew.
set -e
case " $* " in
*" --test "*)
    (
        skip=
        for argument do
            shift
            if [ -n "$skip" ]; then
                skip=
                continue
            fi
            case $argument in
            --test) ;;
            --test-*) skip=1 ;;
            *) set -- "$@" "$argument" ;;
            esac
        done
        rustdoc "$@" --document-private-items -D warnings --out-dir "${TMPDIR:-/tmp}/vramp-doc-$$"
    )
    rm -rf "${TMPDIR:-/tmp}/vramp-doc-$$"
    ;;
esac
exec rustdoc "$@"
