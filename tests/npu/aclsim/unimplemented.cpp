// Calls that torch_npu links to and that aclsim does not simulate: each fails and is counted.
//
// An answer of success without the work would pass for a result. What returns a code gives an
// error code, what returns a handle gives a null one.

#include <atomic>
#include <cstdio>
#include <cstdlib>

#define ACL_CALL extern "C" __attribute__((visibility("default")))

namespace {

constexpr long kNotSupported = 207000;

std::atomic<long> calls{0};

void count(const char *name) {
  ++calls;
  const char *path = std::getenv("ACLSIM_REPORT");
  if (path == nullptr) return;
  if (std::FILE *report = std::fopen(path, "a")) {
    std::fprintf(report, "%s\n", name);
    std::fclose(report);
  }
}

}  // namespace

// How often this process has called any of them.
ACL_CALL long aclsim_unimplemented_calls() { return calls; }

#define FAILS(name)    \
  ACL_CALL long name() { \
    count(#name);        \
    return kNotSupported; \
  }
#define GIVES_NOTHING(name) \
  ACL_CALL void *name() {     \
    count(#name);             \
    return nullptr;           \
  }

FAILS(MsprofGetHashId)
FAILS(MsprofReportAdditionalInfo)
FAILS(MsprofReportApi)
FAILS(MsprofReportCompactInfo)
FAILS(MsprofSysCycleTime)
GIVES_NOTHING(aclCreateDataBuffer)
GIVES_NOTHING(aclCreateTensorDesc)
FAILS(aclDestroyDataBuffer)
FAILS(aclDestroyTensorDesc)
FAILS(aclGetDeviceCapability)
FAILS(aclGetTensorDescDimV2)
FAILS(aclGetTensorDescFormat)
FAILS(aclGetTensorDescNumDims)
FAILS(aclGetTensorDescType)
FAILS(aclSetTensorDescName)
FAILS(aclSetTensorFormat)
FAILS(aclSetTensorPlaceMent)
FAILS(aclSetTensorShape)
FAILS(aclmdlFinalizeDump)
FAILS(aclmdlInitDump)
FAILS(aclmdlSetDump)
FAILS(aclopCompileAndExecute)
GIVES_NOTHING(aclopCreateAttr)
FAILS(aclopDestroyAttr)
FAILS(aclopSetAttrBool)
FAILS(aclopSetAttrDataType)
FAILS(aclopSetAttrFloat)
FAILS(aclopSetAttrInt)
FAILS(aclopSetAttrListBool)
FAILS(aclopSetAttrListFloat)
FAILS(aclopSetAttrListInt)
FAILS(aclopSetAttrListListInt)
FAILS(aclopSetAttrString)
FAILS(aclrtBinaryGetFunction)
FAILS(aclrtBinaryLoadFromData)
FAILS(aclrtDeviceEnablePeerAccess)
FAILS(aclrtDeviceGetBareTgid)
FAILS(aclrtFreePhysical)
FAILS(aclrtGetFunctionAddr)
FAILS(aclrtMallocPhysical)
FAILS(aclrtMapMem)
FAILS(aclrtMemExportToShareableHandle)
FAILS(aclrtMemImportFromShareableHandle)
FAILS(aclrtMemSetPidToShareableHandle)
FAILS(aclrtMemset)
FAILS(aclrtProcessReport)
FAILS(aclrtReleaseMemAddress)
FAILS(aclrtReserveMemAddress)
FAILS(aclrtUnmapMem)
FAILS(rtDevBinaryRegister)
FAILS(rtFunctionRegister)
FAILS(rtGetC2cCtrlAddr)
FAILS(rtKernelLaunch)
