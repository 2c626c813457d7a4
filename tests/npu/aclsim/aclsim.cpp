// An ACL runtime without an Ascend device, for the real torch_npu to run on.
//
// A stream is a thread with a queue, device memory is host memory that only copies may touch, an
// event counts the records that its streams have passed. There are no kernels: a tensor can be
// made (empty), filled and read by copies of one dtype between contiguous memories, nothing else.
// What is not simulated is in unimplemented.cpp: it fails, and is counted. It is never answered
// with a success that means nothing.
//
// Compiled against the headers in torch_npu's own wheel, so that the signatures are the real ones.
//
// The environment describes the machine:
//   ACLSIM_DEVICES      how many devices there are; default 2
//   ACLSIM_COUNT_ERROR  the code that counting them fails with; default 0: it does not
//   ACLSIM_DRIVER       the driver's version; default 25.5.0
//   ACLSIM_H2D_MIB_S    MiB per second of copies to a device; default 0: as fast as memcpy
//   ACLSIM_REPORT       a file that gets a line for each call that is not implemented
// aclsim_set, aclsim_hold and aclsim_release at the end are for tests, by ctypes.

#include <acl/acl_rt.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "memory.hpp"
#include "streams.hpp"

// For functions that newer runtimes have and these headers may not declare.
#define ACL_CALL extern "C" __attribute__((visibility("default")))

namespace {

long number(const char *variable, long otherwise) {
  const char *text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atol(text);
}

int device_count() { return static_cast<int>(number("ACLSIM_DEVICES", 2)); }

// What a test asks for; counts go down as the fault is shown.
struct Faults {
  std::atomic<int64_t> drop_copies{0};    // copies to the host do not happen, and nobody is told
  std::atomic<int64_t> refuse_copies{0};  // asynchronous copies fail when they are queued
  std::atomic<int64_t> refuse_pinned{0};  // page-locked allocations find no memory

  static bool shown(std::atomic<int64_t> &count) {
    int64_t left = count.load();
    while (left > 0) {
      if (count.compare_exchange_weak(left, left - 1)) return true;
    }
    return false;
  }
};

Faults &faults() {
  static auto *one = new Faults;
  return *one;
}

// --- the calling thread -----------------------------------------------------------------------

thread_local int current_device = -1;  // -1: the thread has no context

Stream *stream_of(void *handle) {
  return Handles::get().stream(handle, current_device < 0 ? 0 : current_device);
}

// --- copies -----------------------------------------------------------------------------------

struct Copy {
  void *target;
  const void *source;
  size_t nbytes;
  bool to_device = false;
  bool to_host = false;
  bool is_asynchronous = true;  // between page-locked memory and a device, or on one

  // Whether the memories are of the kinds that the caller says.
  bool examine(aclrtMemcpyKind kind) {
    Range from{};
    Range to{};
    bool knows_from = Memory::get().look_up(source, nbytes, &from);
    bool knows_to = Memory::get().look_up(target, nbytes, &to);
    bool from_device = knows_from && from.kind == Kind::device;
    to_device = knows_to && to.kind == Kind::device;
    to_host = from_device && !to_device;
    is_asynchronous = knows_from && knows_to;
    switch (kind) {
      case ACL_MEMCPY_HOST_TO_HOST: return !from_device && !to_device;
      case ACL_MEMCPY_HOST_TO_DEVICE: return !from_device && to_device;
      case ACL_MEMCPY_DEVICE_TO_HOST: return from_device && !to_device;
      case ACL_MEMCPY_DEVICE_TO_DEVICE: return from_device && to_device;
      default: return false;
    }
  }

  void run() const {
    if (to_host && Faults::shown(faults().drop_copies)) return;
    long mib_per_s = to_device && !from_is_device() ? number("ACLSIM_H2D_MIB_S", 0) : 0;
    if (mib_per_s > 0) {
      std::this_thread::sleep_for(std::chrono::duration<double>(
          static_cast<double>(nbytes) / (1 << 20) / static_cast<double>(mib_per_s)));
    }
    std::memmove(target, source, nbytes);
  }

 private:
  bool from_is_device() const {
    Range from{};
    return Memory::get().look_up(source, nbytes, &from) && from.kind == Kind::device;
  }
};

template <typename Use>
aclError parameter(aclSysParamOpt option, Use use) {
  static std::mutex mutex;
  static auto *kept = new std::map<int, int64_t>;
  std::lock_guard<std::mutex> lock(mutex);
  use((*kept)[option]);
  return kOk;
}

aclError synchronize(Stream *stream) {
  if (stream == nullptr) return kInvalidParameter;
  stream->drain();
  return kOk;
}

}  // namespace

// --- the process and its devices --------------------------------------------------------------

ACL_CALL aclError aclInit(const char *) { return kOk; }
ACL_CALL aclError aclFinalize() { return kOk; }
ACL_CALL const char *aclGetRecentErrMsg() { return "aclsim has no message"; }
ACL_CALL const char *aclrtGetSocName() { return "Ascend910B1"; }

ACL_CALL aclError aclrtGetDeviceCount(uint32_t *count) {
  if (long code = number("ACLSIM_COUNT_ERROR", 0)) return static_cast<aclError>(code);
  *count = static_cast<uint32_t>(device_count());
  return kOk;
}

ACL_CALL aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= device_count()) return kInvalidDevice;
  current_device = device;
  return kOk;
}

ACL_CALL aclError aclrtGetDevice(int32_t *device) {
  if (current_device < 0) return kNoContext;
  *device = current_device;
  return kOk;
}

ACL_CALL aclError aclrtResetDevice(int32_t) { return kOk; }

// A context is its device's number and one, as an address.
ACL_CALL aclError aclrtGetCurrentContext(aclrtContext *context) {
  if (current_device < 0) return kNoContext;
  *context = reinterpret_cast<void *>(static_cast<uintptr_t>(current_device) + 1);
  return kOk;
}

ACL_CALL aclError aclrtSetCurrentContext(aclrtContext context) {
  return aclrtSetDevice(static_cast<int32_t>(reinterpret_cast<uintptr_t>(context)) - 1);
}

ACL_CALL aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *is_active) {
  if (device < 0 || device >= device_count()) return kInvalidDevice;
  if (flags != nullptr) *flags = 0;
  if (is_active != nullptr) *is_active = 1;
  return kOk;
}

ACL_CALL aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t, int32_t) {
  *can = 0;
  return kOk;
}

ACL_CALL aclError aclrtGetMemInfo(aclrtMemAttr, size_t *free, size_t *total) {
  *total = kDeviceBytes;
  *free = kDeviceBytes - Memory::get().used();
  return kOk;
}

ACL_CALL aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion *version) {
  const char *driver = std::getenv("ACLSIM_DRIVER");
  std::memset(version, 0, sizeof *version);
  std::strncpy(version->version,
               name != ACL_PKG_NAME_DRIVER ? "9.0.0" : driver == nullptr ? "25.5.0" : driver,
               sizeof version->version - 1);
  return kOk;
}

ACL_CALL aclError aclsysGetVersionStr(char *name, char *version) {
  aclCANNPackageVersion found;
  bool is_driver = std::string(name).find("driver") != std::string::npos;
  aclsysGetCANNVersion(is_driver ? ACL_PKG_NAME_DRIVER : ACL_PKG_NAME_CANN, &found);
  std::strcpy(version, found.version);
  return kOk;
}

// Settings that change nothing of what is simulated.
ACL_CALL aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return kOk; }
ACL_CALL aclError aclrtSetOpExecuteTimeOut(uint32_t) { return kOk; }
ACL_CALL aclError aclrtSetOpWaitTimeout(uint32_t) { return kOk; }
ACL_CALL aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return kOk; }
ACL_CALL int32_t MsprofRegisterCallback(uint32_t, void *) { return 0; }
ACL_CALL void aclAppLog(aclLogLevel, const char *, const char *, uint32_t, const char *, ...) {}

// Parameters that are kept, and 0 until they are set.
ACL_CALL aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return parameter(option, [value](int64_t &kept) { kept = value; });
}

ACL_CALL aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
  return parameter(option, [value](int64_t &kept) { *value = kept; });
}

ACL_CALL aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return aclrtSetSysParamOpt(option, value);
}

ACL_CALL aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
  return aclrtGetSysParamOpt(option, value);
}

// --- memory -----------------------------------------------------------------------------------

ACL_CALL aclError aclrtMalloc(void **address, size_t nbytes, aclrtMemMallocPolicy) {
  if (current_device < 0) return kNoContext;
  return Memory::get().allocate(address, nbytes, Kind::device, current_device);
}

ACL_CALL aclError aclrtMallocAlign32(void **address, size_t nbytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(address, nbytes, policy);
}

ACL_CALL aclError aclrtFree(void *address) { return Memory::get().free(address, true); }

ACL_CALL aclError aclrtMallocHost(void **address, size_t nbytes) {
  if (Faults::shown(faults().refuse_pinned)) return kOutOfMemory;
  return Memory::get().allocate(address, nbytes, Kind::page_locked, current_device);
}

ACL_CALL aclError aclrtMallocHostWithCfg(void **address, uint64_t nbytes, aclrtMallocConfig *) {
  return aclrtMallocHost(address, nbytes);
}

ACL_CALL aclError aclrtFreeHost(void *address) { return Memory::get().free(address, false); }

ACL_CALL aclError aclrtHostRegisterV2(void *address, uint64_t nbytes, uint32_t) {
  return Memory::get().enlist(address, nbytes, current_device);
}

ACL_CALL aclError aclrtHostUnregister(void *address) { return Memory::get().strike(address); }

ACL_CALL aclError aclrtPointerGetAttributes(const void *address, aclrtPtrAttributes *attributes) {
  Range range{};
  std::memset(attributes, 0, sizeof *attributes);
  attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  if (Memory::get().look_up(address, 1, &range)) {
    bool is_device = range.kind == Kind::device;
    attributes->location.type =
        is_device ? ACL_MEM_LOCATION_TYPE_DEVICE : ACL_MEM_LOCATION_TYPE_HOST;
    attributes->location.id = static_cast<uint32_t>(range.device < 0 ? 0 : range.device);
  }
  return kOk;
}

// --- streams ----------------------------------------------------------------------------------

ACL_CALL aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t, uint32_t) {
  if (current_device < 0) return kNoContext;
  *stream = Handles::get().add_stream(current_device);
  return kOk;
}

ACL_CALL aclError aclrtCreateStream(aclrtStream *stream) {
  return aclrtCreateStreamWithConfig(stream, 0, 0);
}

ACL_CALL aclError aclrtDestroyStream(aclrtStream stream) { return synchronize(stream_of(stream)); }
ACL_CALL aclError aclrtDestroyStreamForce(aclrtStream) { return kOk; }

ACL_CALL aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) {
  Stream *found = stream_of(stream);
  if (found == nullptr) return kInvalidParameter;
  *id = found->id;
  return kOk;
}

ACL_CALL aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
  Stream *found = stream_of(stream);
  if (found == nullptr) return kInvalidParameter;
  *status = found->is_idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return kOk;
}

ACL_CALL aclError aclrtSynchronizeStream(aclrtStream stream) {
  return synchronize(stream_of(stream));
}

ACL_CALL aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) {
  return synchronize(stream_of(stream));
}

ACL_CALL aclError aclrtSynchronizeDevice() {
  if (current_device < 0) return kNoContext;
  for (Stream *stream : Handles::get().streams_of(current_device)) stream->drain();
  return kOk;
}

ACL_CALL aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

// --- events -----------------------------------------------------------------------------------

ACL_CALL aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag) {
  *event = Handles::get().add_event((flag & ACL_EVENT_TIME_LINE) != 0);
  return kOk;
}

ACL_CALL aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag) {
  return aclrtCreateEventExWithFlag(event, flag);
}

ACL_CALL aclError aclrtDestroyEvent(aclrtEvent event) { return Handles::get().destroy_event(event); }

ACL_CALL aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  auto recorded = Handles::get().event(event);
  Stream *target = stream_of(stream);
  if (recorded == nullptr || target == nullptr) return kInvalidParameter;
  uint64_t ticket = recorded->record();
  target->launch([recorded, ticket] { recorded->pass(ticket); });
  return kOk;
}

ACL_CALL aclError aclrtResetEvent(aclrtEvent event, aclrtStream stream) {
  // A later record gives it a new ticket, so there is nothing to take back.
  return Handles::get().event(event) && stream_of(stream) ? kOk : kInvalidParameter;
}

ACL_CALL aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  auto awaited = Handles::get().event(event);
  Stream *target = stream_of(stream);
  if (awaited == nullptr || target == nullptr) return kInvalidParameter;
  uint64_t ticket = awaited->last_ticket();
  target->launch([awaited, ticket] { awaited->await(ticket); });
  return kOk;
}

ACL_CALL aclError aclrtSynchronizeEvent(aclrtEvent event) {
  auto awaited = Handles::get().event(event);
  if (awaited == nullptr) return kInvalidParameter;
  awaited->await(awaited->last_ticket());
  return kOk;
}

ACL_CALL aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
  auto asked = Handles::get().event(event);
  if (asked == nullptr) return kInvalidParameter;
  *status = asked->is_passed() ? ACL_EVENT_RECORDED_STATUS_COMPLETE
                               : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return kOk;
}

ACL_CALL aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus *status) {
  auto asked = Handles::get().event(event);
  if (asked == nullptr) return kInvalidParameter;
  *status = asked->is_passed() ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return kOk;
}

ACL_CALL aclError aclrtEventElapsedTime(float *ms, aclrtEvent start, aclrtEvent end) {
  auto first = Handles::get().event(start);
  auto last = Handles::get().event(end);
  if (first == nullptr || last == nullptr || !first->is_timed || !last->is_timed) {
    return kInvalidParameter;
  }
  *ms = std::chrono::duration<float, std::milli>(last->passed_at() - first->passed_at()).count();
  return kOk;
}

// --- copies -----------------------------------------------------------------------------------

ACL_CALL aclError aclrtMemcpy(void *target, size_t room, const void *source, size_t nbytes,
                              aclrtMemcpyKind kind) {
  Copy copy{target, source, nbytes};
  if (nbytes > room || !copy.examine(kind)) return kInvalidParameter;
  copy.run();
  return kOk;
}

ACL_CALL aclError aclrtMemcpyAsync(void *target, size_t room, const void *source, size_t nbytes,
                                   aclrtMemcpyKind kind, aclrtStream stream) {
  Copy copy{target, source, nbytes};
  Stream *runner = stream_of(stream);
  if (runner == nullptr || nbytes > room || !copy.examine(kind)) return kInvalidParameter;
  if (Faults::shown(faults().refuse_copies)) return kDeviceFailed;
  runner->launch([copy] { copy.run(); });
  if (!copy.is_asynchronous) runner->drain();
  return kOk;
}

// --- for tests --------------------------------------------------------------------------------

// Sets a fault by name; false: there is none of that name.
ACL_CALL bool aclsim_set(const char *name, int64_t count) {
  std::string wanted = name;
  if (wanted == "drop_copies") return faults().drop_copies = count, true;
  if (wanted == "refuse_copies") return faults().refuse_copies = count, true;
  if (wanted == "refuse_pinned") return faults().refuse_pinned = count, true;
  return false;
}

// Stops a stream after the task that it runs, and lets it go on.
ACL_CALL bool aclsim_hold(void *stream) {
  Stream *found = stream_of(stream);
  if (found != nullptr) found->hold(true);
  return found != nullptr;
}

ACL_CALL bool aclsim_release(void *stream) {
  Stream *found = stream_of(stream);
  if (found != nullptr) found->hold(false);
  return found != nullptr;
}
