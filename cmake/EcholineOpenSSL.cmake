# OpenSSL::SSL and OpenSSL::Crypto: what build_openssl.sh has built for this checkout, or else the system's.
set(folder ${CMAKE_SOURCE_DIR}/build/openssl)
if(EXISTS ${folder}/lib/libssl.a AND NOT OPENSSL_ROOT_DIR)
  set(OPENSSL_ROOT_DIR ${folder})
  set(OPENSSL_USE_STATIC_LIBS TRUE)
  unset(OPENSSL_INCLUDE_DIR CACHE)  # found before it was built
  unset(OPENSSL_SSL_LIBRARY CACHE)
  unset(OPENSSL_CRYPTO_LIBRARY CACHE)
endif()
find_package(OpenSSL 3.0 REQUIRED)
message(STATUS "OpenSSL: ${OPENSSL_VERSION} (${OPENSSL_SSL_LIBRARY})")
if(OPENSSL_USE_STATIC_LIBS)
  # Other libraries of the program load the system's: neither may be taken for the other.
  set_property(TARGET OpenSSL::Crypto APPEND PROPERTY INTERFACE_LINK_OPTIONS
    LINKER:--exclude-libs,libssl.a:libcrypto.a)
endif()
