#include "src/core/capture_scope.h"

namespace semitone {
namespace {

thread_local int scopes = 0;

}  // namespace

CaptureScope::CaptureScope() {
  ++scopes;
}

CaptureScope::~CaptureScope() {
  --scopes;
}

bool CaptureScope::is_active() {
  return scopes > 0;
}

}  // namespace semitone
