if(SEMITONE_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${SEMITONE_SANITIZE}> -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${SEMITONE_SANITIZE})
endif()
