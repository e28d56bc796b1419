// The functions of the vramp library that is loaded in this process. They are looked up by name, so that
// this file can be compiled without the library.

#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>

#include "vramp.h"

namespace vramp {

// Every function that is used, by its name in vramp.h.
struct Library {
  decltype(&::vramp_version) version;
  decltype(&::vramp_last_error) last_error;
  decltype(&::vramp_torch_open) open;
  decltype(&::vramp_torch_is_open) is_open;
  decltype(&::vramp_torch_observe) observe;
  decltype(&::vramp_torch_block_malloc) block_malloc;
  decltype(&::vramp_torch_block_free) block_free;
  decltype(&::vramp_torch_block_find) block_find;
  decltype(&::vramp_torch_block_record) block_record;
  decltype(&::vramp_torch_segment_malloc) segment_malloc;
  decltype(&::vramp_torch_comm_malloc) comm_malloc;
  decltype(&::vramp_torch_plain_malloc) plain_malloc;
  decltype(&::vramp_torch_ipc) ipc;
  decltype(&::vramp_torch_segment_free) segment_free;
  decltype(&::vramp_torch_segment_device) segment_device;
  decltype(&::vramp_torch_segment_awake) segment_awake;
  decltype(&::vramp_torch_capture_begins) capture_begins;
  decltype(&::vramp_torch_graph_pins) graph_pins;
  decltype(&::vramp_torch_pin_live) pin_live;
  decltype(&::vramp_torch_unpin) unpin;
  decltype(&::vramp_torch_enable_peer) enable_peer;
  decltype(&::vramp_torch_share) share;
  decltype(&::vramp_torch_share_open) share_open;
  decltype(&::vramp_torch_share_close) share_close;
  decltype(&::vramp_torch_memory) memory;
  decltype(&::vramp_torch_reserved) reserved;
  decltype(&::vramp_torch_containing) containing;
  decltype(&::vramp_torch_visit) visit;
  decltype(&::vramp_torch_reset_peaks) reset_peaks;
  decltype(&::vramp_torch_stream_forget) stream_forget;
  decltype(&::vramp_torch_trim) trim;
  decltype(&::vramp_torch_set_fraction) set_fraction;

  // Looks up the functions in a library that the process has loaded.
  explicit Library(const char* path) {
    void* handle = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (handle == nullptr) {
      throw std::runtime_error(std::string("the vramp library is not loaded: ") + path);
    }
    find(handle, "vramp_version", version);
    find(handle, "vramp_last_error", last_error);
    find(handle, "vramp_torch_open", open);
    find(handle, "vramp_torch_is_open", is_open);
    find(handle, "vramp_torch_observe", observe);
    find(handle, "vramp_torch_block_malloc", block_malloc);
    find(handle, "vramp_torch_block_free", block_free);
    find(handle, "vramp_torch_block_find", block_find);
    find(handle, "vramp_torch_block_record", block_record);
    find(handle, "vramp_torch_segment_malloc", segment_malloc);
    find(handle, "vramp_torch_comm_malloc", comm_malloc);
    find(handle, "vramp_torch_plain_malloc", plain_malloc);
    find(handle, "vramp_torch_ipc", ipc);
    find(handle, "vramp_torch_segment_free", segment_free);
    find(handle, "vramp_torch_segment_device", segment_device);
    find(handle, "vramp_torch_segment_awake", segment_awake);
    find(handle, "vramp_torch_capture_begins", capture_begins);
    find(handle, "vramp_torch_graph_pins", graph_pins);
    find(handle, "vramp_torch_pin_live", pin_live);
    find(handle, "vramp_torch_unpin", unpin);
    find(handle, "vramp_torch_enable_peer", enable_peer);
    find(handle, "vramp_torch_share", share);
    find(handle, "vramp_torch_share_open", share_open);
    find(handle, "vramp_torch_share_close", share_close);
    find(handle, "vramp_torch_memory", memory);
    find(handle, "vramp_torch_reserved", reserved);
    find(handle, "vramp_torch_containing", containing);
    find(handle, "vramp_torch_visit", visit);
    find(handle, "vramp_torch_reset_peaks", reset_peaks);
    find(handle, "vramp_torch_stream_forget", stream_forget);
    find(handle, "vramp_torch_trim", trim);
    find(handle, "vramp_torch_set_fraction", set_fraction);
    // The handle is kept: the functions are used until the process ends.
  }

 private:
  template <typename F>
  static void find(void* handle, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(handle, name));
    if (function == nullptr) {
      throw std::runtime_error(std::string("the vramp library lacks ") + name +
                               ": reinstall vramp, its files are of different versions");
    }
  }
};

} // namespace vramp
