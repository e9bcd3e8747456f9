// Starts the kernels of training_kernels.cu on a stream. The pointers of a job are device addresses. A job must have at
// least one row or part. Internal to this folder.
#pragma once
#include <cuda_runtime_api.h>

#include "model/cuda/training_kernels.hpp"
#include "model/cuda/training_update.hpp"

namespace echoline::model::training {

// These templates are instantiated for T = float and T = Bf16.
template <class T>
cudaError_t launch(const NormJob<T>& job, cudaStream_t stream);
template <class T>
cudaError_t launch(const NormBackwardJob<T>& job, cudaStream_t stream);
template <class T>
cudaError_t launch(const ColumnSumsJob<T>& job, cudaStream_t stream);
template <class T>
cudaError_t launch(const RotateJob<T>& job, cudaStream_t stream);
template <class T>
cudaError_t launch(const RotateBackwardJob<T>& job, cudaStream_t stream);
template <class T>
cudaError_t launch(const GatherJob<T>& job, cudaStream_t stream);
template <class T>
cudaError_t launch(const GateJob<T>& job, cudaStream_t stream);  // backward if job.slope is set
template <class T>
cudaError_t launch(const ScoreJob<T>& job, cudaStream_t stream);  // backward if job.slopes is set

cudaError_t launch(const UpdateJob& job, cudaStream_t stream);
cudaError_t launch(const SquaresJob& job, cudaStream_t stream);
cudaError_t launch(const AddJob& job, cudaStream_t stream);

}  // namespace echoline::model::training
