// The part of libtorch that echoline uses: tensors, modules and automatic differentiation. Every other file of ours
// that needs libtorch includes this one, which is precompiled; <torch/torch.h> costs half as much again.
#pragma once
#include <torch/autograd.h>
#include <torch/nn/module.h>
#include <torch/types.h>
#include <torch/utils.h>
