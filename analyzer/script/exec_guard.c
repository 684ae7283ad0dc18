// Preloaded into every process of a launch script (LD_PRELOAD, Linux). A program that is called by its path, by a shell or by any
// other program, is replaced by the stand-in of its name. Without this library only bash and PATH are covered.
//
// Only the stack is used for memory: the functions may run in a child of vfork, which shares the memory of its parent.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern char** environ;

typedef int (*execve_function)(const char*, char* const[], char* const[]);
typedef int (*spawn_function)(pid_t*, const char*, const posix_spawn_file_actions_t*, const posix_spawnattr_t*, char* const[],
                              char* const[]);

static char folder[PATH_MAX];   // of the run
static char library[PATH_MAX];  // this library
static execve_function real_execve;
static spawn_function real_spawn;

__attribute__((constructor)) static void start(void) {
  const char* value = getenv("INFO_SCRIPT_FOLDER");
  if (value != NULL && strlen(value) < sizeof folder) strcpy(folder, value);
  value = getenv("INFO_SCRIPT_PRELOAD");
  if (value != NULL && strlen(value) < sizeof library) strcpy(library, value);
  real_execve = (execve_function)dlsym(RTLD_NEXT, "execve");
  real_spawn = (spawn_function)dlsym(RTLD_NEXT, "posix_spawn");
}

static const char* base_of(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash == NULL ? path : slash + 1;
}

static const char* value_in(char* const envp[], const char* name) {
  size_t length = strlen(name);
  for (size_t i = 0; envp != NULL && envp[i] != NULL; i++)
    if (strncmp(envp[i], name, length) == 0 && envp[i][length] == '=') return envp[i] + length + 1;
  return NULL;
}

// Whether a stand-in lets its own process become `path`: INFO_SCRIPT_TRIED is its process id, and paths of which this is the last.
static int is_allowed(const char* path, char* const envp[]) {
  const char* tried = value_in(envp, "INFO_SCRIPT_TRIED");
  if (tried == NULL || strtol(tried, NULL, 10) != (long)getpid()) return 0;
  const char* last = strrchr(tried, ':');
  return last != NULL && strcmp(last + 1, path) == 0;
}

static int stand_in_of(const char* name, char* target) {
  if (*name == '\0' || strcmp(name, "sh") == 0 || strcmp(name, "dash") == 0 || strcmp(name, "env") == 0) return 0;
  if (snprintf(target, PATH_MAX, "%s/bin/%s", folder, name) >= PATH_MAX) return 0;
  if (access(target, X_OK) == 0) return 1;
  if (strncmp(name, "python", 6) == 0 && strspn(name + 6, "0123456789.") == strlen(name + 6))
    return snprintf(target, PATH_MAX, "%s/bin/python3", folder) < PATH_MAX && access(target, X_OK) == 0;
  if (strncmp(name, "pip", 3) == 0 && strspn(name + 3, "0123456789.") == strlen(name + 3))
    return snprintf(target, PATH_MAX, "%s/bin/pip3", folder) < PATH_MAX && access(target, X_OK) == 0;
  return 0;
}

// Whether `path` is to be replaced, by the stand-in in `target`. A link to python or torchrun counts as these. The program itself
// need not exist: on another machine it may be in this place.
static int is_replaced(const char* path, char* const envp[], char* target) {
  size_t length = strlen(folder);
  if (length == 0 || (strncmp(path, folder, length) == 0 && path[length] == '/')) return 0;
  if (is_allowed(path, envp)) return 0;
  if (stand_in_of(base_of(path), target)) return 1;
  char resolved[PATH_MAX];
  if (realpath(path, resolved) == NULL) return 0;
  const char* name = base_of(resolved);
  int launcher = strncmp(name, "python", 6) == 0 || strcmp(name, "torchrun") == 0 || strcmp(name, "deepspeed") == 0;
  return launcher && stand_in_of(name, target);
}

// The python of a script with `#!/path/to/python [option]`: its stand-in in `target`, and the option in `option`.
static int has_python(const char* path, char* target, char* interpreter, char* option) {
  char line[PATH_MAX + 256];
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  ssize_t size = read(file, line, sizeof line - 1);
  close(file);
  if (size < 4 || line[0] != '#' || line[1] != '!') return 0;
  line[size] = '\0';
  line[strcspn(line, "\n")] = '\0';
  option[0] = '\0';
  if (sscanf(line + 2, " %4095s %255s", interpreter, option) < 1) return 0;
  if (strncmp(base_of(interpreter), "python", 6) != 0) return 0;
  size_t length = strlen(folder);
  if (length == 0 || (strncmp(path, folder, length) == 0 && path[length] == '/')) return 0;
  return stand_in_of(base_of(interpreter), target);
}

// Calls the real function with the program, arguments and environment that stand for the given ones.
static int call(pid_t* child, const posix_spawn_file_actions_t* actions, const posix_spawnattr_t* attributes, const char* path,
                char* const argv[], char* const envp[]) {
  char target[PATH_MAX], interpreter[PATH_MAX], option[256], called[PATH_MAX + 32], preload[2 * PATH_MAX], own[PATH_MAX + 32];
  size_t arguments = 0, variables = 0, count = 0;
  while (argv != NULL && argv[arguments] != NULL) arguments++;
  while (envp != NULL && envp[variables] != NULL) variables++;
  char *words[arguments + 4], *values[variables + 5];
  int replaced = is_replaced(path, envp, target);
  int script = !replaced && folder[0] != '\0' && !is_allowed(path, envp) && has_python(path, target, interpreter, option);
  if (script) {
    words[count++] = target;
    if (option[0] != '\0') words[count++] = option;
    words[count++] = (char*)path;
    for (size_t i = 1; i < arguments; i++) words[count++] = argv[i];
  } else {
    for (size_t i = 0; i < arguments; i++) words[count++] = argv[i];
    if (replaced && count > 0) words[0] = target;
  }
  words[count] = NULL;
  count = 0;
  for (size_t i = 0; i < variables; i++) {
    int is_real = strncmp(envp[i], "INFO_SCRIPT_REAL=", 17) == 0;
    int is_preload = strncmp(envp[i], "LD_PRELOAD=", 11) == 0 && strstr(envp[i], library) == NULL;
    if (!((replaced || script) && is_real) && !is_preload) values[count++] = envp[i];
  }
  if (folder[0] != '\0' && library[0] != '\0') {
    const char* others = value_in(envp, "LD_PRELOAD");
    if (others == NULL || strstr(others, library) == NULL) {
      snprintf(preload, sizeof preload, "LD_PRELOAD=%s%s%s", library, others == NULL ? "" : ":", others == NULL ? "" : others);
      values[count++] = preload;
    }
    if (value_in(envp, "INFO_SCRIPT_FOLDER") == NULL) {
      snprintf(own, sizeof own, "INFO_SCRIPT_FOLDER=%s", folder);
      values[count++] = own;
    }
  }
  if (replaced || script) {
    snprintf(called, sizeof called, "INFO_SCRIPT_REAL=%s", script ? interpreter : path);
    values[count++] = called;
  }
  values[count] = NULL;
  const char* program = replaced || script ? target : path;
  if (child != NULL) return real_spawn(child, program, actions, attributes, words, values);
  return real_execve(program, words, values);
}

// The file that PATH finds for a name without a folder.
static int find(const char* name, char* found) {
  if (strchr(name, '/') != NULL) return snprintf(found, PATH_MAX, "%s", name) < PATH_MAX;
  const char* places = getenv("PATH");
  if (places == NULL) places = "/bin:/usr/bin";
  while (1) {
    size_t length = strcspn(places, ":");
    if (snprintf(found, PATH_MAX, "%.*s/%s", length > 0 ? (int)length : 1, length > 0 ? places : ".", name) < PATH_MAX &&
        access(found, X_OK) == 0)
      return 1;
    if (places[length] == '\0') break;
    places += length + 1;
  }
  errno = ENOENT;
  return 0;
}

int execve(const char* path, char* const argv[], char* const envp[]) { return call(NULL, NULL, NULL, path, argv, envp); }

int execv(const char* path, char* const argv[]) { return call(NULL, NULL, NULL, path, argv, environ); }

int execvpe(const char* file, char* const argv[], char* const envp[]) {
  char found[PATH_MAX];
  if (!find(file, found)) return -1;
  int status = call(NULL, NULL, NULL, found, argv, envp);
  if (errno != ENOEXEC) return status;
  size_t count = 0;
  while (argv[count] != NULL) count++;
  char* words[count + 2];
  words[0] = "/bin/sh";
  words[1] = found;
  for (size_t i = 1; i <= count; i++) words[i + 1] = argv[i];
  if (count == 0) words[2] = NULL;
  return call(NULL, NULL, NULL, words[0], words, envp);
}

int execvp(const char* file, char* const argv[]) { return execvpe(file, argv, environ); }

#define COLLECT(first)                         \
  va_list rest;                                \
  size_t count = 1;                            \
  va_start(rest, first);                       \
  while (va_arg(rest, char*) != NULL) count++; \
  va_end(rest);                                \
  char* words[count + 1];                      \
  words[0] = (char*)first;                     \
  va_start(rest, first);                       \
  for (size_t i = 1; i <= count; i++) words[i] = va_arg(rest, char*);

int execl(const char* path, const char* first, ...) {
  COLLECT(first)
  va_end(rest);
  return call(NULL, NULL, NULL, path, words, environ);
}

int execlp(const char* file, const char* first, ...) {
  COLLECT(first)
  va_end(rest);
  return execvpe(file, words, environ);
}

int execle(const char* path, const char* first, ...) {
  COLLECT(first)
  char* const* envp = va_arg(rest, char* const*);
  va_end(rest);
  return call(NULL, NULL, NULL, path, words, envp);
}

int posix_spawn(pid_t* child, const char* path, const posix_spawn_file_actions_t* actions, const posix_spawnattr_t* attributes,
                char* const argv[], char* const envp[]) {
  pid_t unused;
  return call(child != NULL ? child : &unused, actions, attributes, path, argv, envp);
}

int posix_spawnp(pid_t* child, const char* file, const posix_spawn_file_actions_t* actions, const posix_spawnattr_t* attributes,
                 char* const argv[], char* const envp[]) {
  char found[PATH_MAX];
  pid_t unused;
  if (!find(file, found)) return errno;
  return call(child != NULL ? child : &unused, actions, attributes, found, argv, envp);
}
