#pragma once

#include "ATen/cuda/CUDAGraph.h"
