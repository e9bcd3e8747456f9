// All device code of a decoding step. Internal to this folder.
#pragma once
#include "model/cuda/attention.hpp"
#include "model/cuda/product.hpp"
#include "model/cuda/sampling.hpp"
