// A CUDA driver with three GPUs, as far as counting them goes.
extern "C" {

int cuInit(unsigned flags);
int cuDeviceGetCount(int* count);

int cuInit(unsigned flags) {
  return flags == 0 ? 0 : 1;
}

int cuDeviceGetCount(int* count) {
  *count = 3;
  return 0;
}
}
