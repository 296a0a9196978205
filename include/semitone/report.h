#pragma once

/// What a training reports.

#include "semitone/core/error.h"
