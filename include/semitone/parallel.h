#pragma once

/// Training on several processes or devices: comm::init and groups, DistributedDataParallel,
/// DataParallel, SyncBatchNorm, samplers, ZeroRedundancyOptimizer.

#include "semitone/comm/group.h"
#include "semitone/comm/init.h"
#include "semitone/comm/init_options.h"
#include "semitone/core/error.h"
#include "semitone/parallel/comm_hook.h"
#include "semitone/parallel/data_parallel.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "semitone/parallel/distributed_data_parallel_options.h"
#include "semitone/parallel/gradient_order.h"
#include "semitone/parallel/no_sync.h"
#include "semitone/parallel/post_local_sgd.h"
#include "semitone/parallel/power_sgd.h"
#include "semitone/parallel/quantized_all_reduce.h"
#include "semitone/parallel/sampler.h"
#include "semitone/parallel/sync_batch_norm.h"
#include "semitone/parallel/zero_redundancy_optimizer.h"
