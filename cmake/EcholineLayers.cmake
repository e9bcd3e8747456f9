# The folders that each folder may use: the table of ARCHITECTURE.md, "Folders". echoline_library() refuses a dependency
# that is not here, and tests/structure checks every #include against it.
set(ECHOLINE_LAYERS
  "base:"
  "delta: base"
  "chains: base"
  "overlay: base chains"
  "provisioner: base chains"
  "data_plane: base"
  "replay_buffer: base data_plane"
  "store: base delta overlay"
  "model: base delta"
  "learner: base delta chains overlay provisioner data_plane replay_buffer store model"
  "worker: base delta chains overlay data_plane replay_buffer store model"
  "sim: base chains overlay provisioner replay_buffer"
  "pages: base"
  "study: base delta chains overlay provisioner data_plane replay_buffer store model learner worker sim pages"
  "cli: base delta chains overlay provisioner data_plane replay_buffer store model learner worker sim pages study")

# Where libtorch may be known, by the beginning of a file's path; tests/structure follows every #include to it. Only
# libraries that echoline_library() makes with TORCH have sources that do, so the rest builds without it
# (ECHOLINE_TORCH=OFF).
set(ECHOLINE_TORCH_PLACES model/ learner/training/ worker/engines/builtin)

# A folder may use only folders above its own line, so this is the order of configuration as well.
set(ECHOLINE_FOLDERS "")
foreach(line IN LISTS ECHOLINE_LAYERS)
  string(REGEX MATCH "^([a-z_]+): ?(.*)$" matched "${line}")
  list(APPEND ECHOLINE_FOLDERS ${CMAKE_MATCH_1})
  string(REPLACE " " ";" allowed "${CMAKE_MATCH_2}")
  set(ECHOLINE_${CMAKE_MATCH_1}_MAY_USE "${allowed}")
endforeach()

# The top-level folder that the current CMakeLists.txt belongs to.
function(echoline_folder out)
  file(RELATIVE_PATH path ${CMAKE_SOURCE_DIR} ${CMAKE_CURRENT_SOURCE_DIR})
  string(REGEX REPLACE "/.*" "" folder "${path}")
  set(${out} ${folder} PARENT_SCOPE)
endfunction()

# Stops the configuration when a library declares an echoline:: dependency that its folder may not have.
function(echoline_check_layers name)
  echoline_folder(folder)
  foreach(dependency IN LISTS ARGN)
    if(NOT dependency MATCHES "^echoline(::|_)" OR NOT TARGET ${dependency})
      continue()
    endif()
    get_target_property(used ${dependency} ECHOLINE_FOLDER)
    if(used AND NOT used STREQUAL folder AND NOT used IN_LIST ECHOLINE_${folder}_MAY_USE)
      message(FATAL_ERROR "echoline_library(${name}) uses ${dependency}, but ${folder}/ may use only: "
                          "${ECHOLINE_${folder}_MAY_USE} (cmake/EcholineLayers.cmake)")
    endif()
  endforeach()
endfunction()
