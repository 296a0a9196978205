// A stand-in for a CUDA driver with three GPUs of compute capability 6.1.
// NOLINTBEGIN(readability-identifier-naming): the driver's names.
extern "C" {

int cuInit(unsigned flags);
int cuDeviceGetCount(int* count);
int cuDeviceGetAttribute(int* value, int attribute, int device);

int cuInit(unsigned flags) {
  return flags == 0 ? 0 : 1;
}

int cuDeviceGetCount(int* count) {
  *count = 3;
  return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (device < 0 || device > 2) return 1;
  *value = attribute == 75 ? 6 : 1;
  return 0;
}
}
// NOLINTEND(readability-identifier-naming)
