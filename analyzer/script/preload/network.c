// Functions that use the network. A connection is made only to a port or socket of the run. Names are found in /etc/hosts; nothing
// is asked from a server.
//
// The path of a socket in the private copy may be too long for an address. Such a socket is bound by a short name, which is changed
// to its path at once. The kernel goes on reporting the short name; the functions that return addresses put the path of the caller
// in its place. Data that is written to a connected socket is not looked at.

#include "common.h"
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

static const struct in6_addr* inner_address(const struct sockaddr* address) {
  return &((const struct sockaddr_in6*)address)->sin6_addr;
}

static bool is_loopback(const struct sockaddr* address) {
  if (address->sa_family == AF_INET) {
    uint32_t number = ntohl(((const struct sockaddr_in*)address)->sin_addr.s_addr);
    return number >> 24 == 127 || number == 0;
  }
  const struct in6_addr* inner = inner_address(address);
  if (IN6_IS_ADDR_V4MAPPED(inner)) return inner->s6_addr[12] == 127;
  return IN6_IS_ADDR_LOOPBACK(inner) || IN6_IS_ADDR_UNSPECIFIED(inner);
}

// An address of this machine on which a process of the run may listen.
static bool is_own_address(const struct sockaddr* address) {
  struct sockaddr_storage own;
  socklen_t size = address->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
  memcpy(&own, address, size);
  if (address->sa_family == AF_INET)
    ((struct sockaddr_in*)&own)->sin_port = 0;
  else
    ((struct sockaddr_in6*)&own)->sin6_port = 0;
  int before = errno;
  int descriptor = (int)KERNEL(SYS_socket, address->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  bool found = descriptor >= 0 && KERNEL(SYS_bind, descriptor, &own, size) == 0;
  if (descriptor >= 0) KERNEL(SYS_close, descriptor);
  errno = before;
  return found;
}

static void port_name(int kind, const struct sockaddr* address, char* name) {
  in_port_t port = address->sa_family == AF_INET ? ((const struct sockaddr_in*)address)->sin_port
                                                 : ((const struct sockaddr_in6*)address)->sin6_port;
  snprintf(name, 32, "%s%u", kind == SOCK_DGRAM ? "udp" : "", (unsigned)ntohs(port));
}

static int kind_of(int descriptor) {
  int kind = 0;
  socklen_t size = sizeof kind;
  getsockopt(descriptor, SOL_SOCKET, SO_TYPE, &kind, &size);
  return kind;
}

static int check_internet(int descriptor, const struct sockaddr* address, socklen_t size) {
  char name[32];
  if (size < (address->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6) - 4)) return fail(EINVAL);
  if (!is_loopback(address) && !is_own_address(address)) return fail(ENETUNREACH);
  port_name(kind_of(descriptor), address, name);
  return is_noted("ports", name) ? 0 : fail(ECONNREFUSED);
}

// The name of an abstract socket as hexadecimal digits.
static void abstract_name(const struct sockaddr_un* address, socklen_t size, char* name) {
  size_t length = size - offsetof(struct sockaddr_un, sun_path) - 1;
  for (size_t i = 0; i < length; i++) sprintf(name + 2 * i, "%02x", (unsigned char)address->sun_path[i + 1]);
  name[2 * length] = '\0';
}

static bool has_path(const struct sockaddr* address, socklen_t size) {
  return size > offsetof(struct sockaddr_un, sun_path) && ((const struct sockaddr_un*)address)->sun_path[0] != '\0';
}

static void socket_path(const struct sockaddr* address, socklen_t size, char* path) {
  size_t length = size - offsetof(struct sockaddr_un, sun_path);
  memcpy(path, ((const struct sockaddr_un*)address)->sun_path, length);
  path[length] = '\0';
}

#define DESCRIPTORS "/proc/self/fd/"
#define SHORT_NAME "/.socket-of-run-"

// Stores the path of a new socket as the text of a link with the name sockets/<number> in the folder of the run.
static int note_path(const char* path, char* number, char* target) {
  static unsigned count;
  char text[PATH_MAX], name[64];
  int before = errno, status;
  snprintf(text, sizeof text, "/dev/null/L%s", path);
  if (run_file(target, "sockets")) KERNEL(SYS_mkdirat, AT_FDCWD, target, 0700);
  do {
    snprintf(number, 32, "%ld-%u", (long)getpid(), __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED));
    snprintf(name, sizeof name, "sockets/%s", number);
    if (!run_file(target, name)) return fail(ENAMETOOLONG);
    status = (int)KERNEL(SYS_symlinkat, text, AT_FDCWD, target);
  } while (status < 0 && errno == EEXIST);
  if (status == 0) errno = before;
  return status;
}

// Puts the path that the caller of `bind` gave in the place of a short name. `room` is the size of the memory for the address.
static void restore_path(void* result, socklen_t room, socklen_t* size) {
  struct sockaddr_un* address = result;
  char path[256], name[64], target[PATH_MAX], text[PATH_MAX];
  if (*size > room || *size > sizeof(struct sockaddr_storage) || *size <= offsetof(struct sockaddr_un, sun_path)) return;
  if (address->sun_family != AF_UNIX || !has_path(result, *size)) return;
  socket_path(result, *size, path);
  const char* found = strstr(path, SHORT_NAME);
  if (found == NULL || strncmp(path, DESCRIPTORS, sizeof DESCRIPTORS - 1) != 0) return;
  int before = errno;
  snprintf(name, sizeof name, "sockets/%.40s", found + sizeof SHORT_NAME - 1);
  const char* given = run_file(target, name) && read_link(target, text) > 0 ? link_target(text) : NULL;
  errno = before;
  if (given == NULL) return;
  *size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(given) + 1);
  memcpy(address->sun_path, given, (*size < room ? *size : room) - offsetof(struct sockaddr_un, sun_path));
}

// The address that the kernel gets, and the descriptor that it needs.
typedef struct {
  const struct sockaddr* address;
  socklen_t size;
  struct sockaddr_un fresh;
  int file;
} destination;

static int check_local(const struct sockaddr* address, socklen_t size, destination* result) {
  char name[256], path[256];
  place found;
  if (size <= offsetof(struct sockaddr_un, sun_path)) return 0;
  if (size > sizeof(struct sockaddr_un)) return fail(EINVAL);
  if (!has_path(address, size)) {
    abstract_name((const struct sockaddr_un*)address, size, name);
    return is_noted("abstract", name) ? 0 : fail(ECONNREFUSED);
  }
  socket_path(address, size, path);
  if (resolve(AT_FDCWD, path, true, &found) < 0) return -1;
  if (found.layer == MISSING || found.status.st_mode == 0) return fail(ENOENT);
  if (found.layer != UPPER && found.layer != OWN) return fail(ECONNREFUSED);
  result->file = (int)KERNEL(SYS_openat, AT_FDCWD, found.real, O_PATH | O_CLOEXEC | O_NOFOLLOW);
  if (result->file < 0) return -1;
  result->fresh = (struct sockaddr_un){.sun_family = AF_UNIX};
  snprintf(result->fresh.sun_path, sizeof result->fresh.sun_path, DESCRIPTORS "%d", result->file);
  result->address = (const struct sockaddr*)&result->fresh;
  result->size = sizeof result->fresh;
  return 0;
}

// Whether data may go to the address. `done` is to be called afterwards if it may.
static int check(int descriptor, const struct sockaddr* address, socklen_t size, destination* result) {
  *result = (destination){.address = address, .size = size, .file = -1};
  if (!protects || address == NULL || size < sizeof(sa_family_t)) return 0;
  switch (address->sa_family) {
    case AF_INET:
    case AF_INET6:
      return check_internet(descriptor, address, size);
    case AF_UNIX:
      return check_local(address, size, result);
    case AF_UNSPEC:
    case AF_NETLINK:
      return 0;
    default:
      return fail(ENETUNREACH);
  }
}

static void done(const destination* result) {
  int before = errno;
  if (result->file >= 0) KERNEL(SYS_close, result->file);
  errno = before;
}

static void note_port(int descriptor) {
  struct sockaddr_storage own;
  socklen_t size = sizeof own;
  char name[32];
  int before = errno;
  if (KERNEL(SYS_getsockname, descriptor, &own, &size) == 0 && (own.ss_family == AF_INET || own.ss_family == AF_INET6)) {
    port_name(kind_of(descriptor), (const struct sockaddr*)&own, name);
    note("ports", name);
  }
  errno = before;
}

// Binds a socket by a short name in the folder of `real`, and changes the name.
static int bind_short(int descriptor, const char* path, const char* real) {
  char parent[PATH_MAX], number[32], noted[PATH_MAX];
  struct sockaddr_un fresh = {.sun_family = AF_UNIX};
  strcpy(parent, real);
  *strrchr(parent, '/') = '\0';
  int folder = (int)KERNEL(SYS_openat, AT_FDCWD, parent, O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return -1;
  int status = note_path(path, number, noted);
  if (status == 0) {
    snprintf(fresh.sun_path, sizeof fresh.sun_path, DESCRIPTORS "%d" SHORT_NAME "%s", folder, number);
    status = (int)KERNEL(SYS_bind, descriptor, &fresh, sizeof fresh);
    bool bound = status == 0;
    if (bound) status = (int)KERNEL(SYS_renameat2, AT_FDCWD, fresh.sun_path, AT_FDCWD, real, 0);
    int before = errno;
    if (bound && status < 0) KERNEL(SYS_unlinkat, AT_FDCWD, fresh.sun_path, 0);
    if (status < 0) KERNEL(SYS_unlinkat, AT_FDCWD, noted, 0);
    errno = before;
  }
  int before = errno;
  KERNEL(SYS_close, folder);
  errno = before;
  return status;
}

static int bind_local(int descriptor, const struct sockaddr* address, socklen_t size) {
  char path[256];
  place found;
  socket_path(address, size, path);
  lock held = take_lock();
  int status = resolve(AT_FDCWD, path, false, &found);
  if (status == 0 && (found.layer == OWN ? found.status.st_mode != 0 : found.layer != MISSING)) status = fail(EADDRINUSE);
  if (status == 0 && found.layer == MISSING) status = make_name_free(&found);
  if (status == 0) status = bind_short(descriptor, path, found.real);
  release(held);
  return status;
}

#pragma GCC visibility push(default)

int bind(int descriptor, __CONST_SOCKADDR_ARG given, socklen_t size) {
  const struct sockaddr* address = given.__sockaddr__;
  if (!protects || address == NULL || size < sizeof(sa_family_t)) return (int)KERNEL(SYS_bind, descriptor, address, size);
  bool is_local = address->sa_family == AF_UNIX && size <= sizeof(struct sockaddr_un);
  if (is_local && has_path(address, size)) return bind_local(descriptor, address, size);
  int status = (int)KERNEL(SYS_bind, descriptor, address, size);
  if (status == 0 && is_local && size > offsetof(struct sockaddr_un, sun_path)) {
    char name[256];
    abstract_name((const struct sockaddr_un*)address, size, name);
    note("abstract", name);
  }
  if (status == 0 && kind_of(descriptor) == SOCK_DGRAM) note_port(descriptor);
  return status;
}

int listen(int descriptor, int length) {
  int status = (int)KERNEL(SYS_listen, descriptor, length);
  if (status == 0 && protects) note_port(descriptor);
  return status;
}

int connect(int descriptor, __CONST_SOCKADDR_ARG given, socklen_t size) {
  destination result;
  if (check(descriptor, given.__sockaddr__, size, &result) < 0) return -1;
  int status = (int)KERNEL(SYS_connect, descriptor, result.address, result.size);
  done(&result);
  return status;
}

ssize_t sendto(int descriptor, const void* data, size_t length, int flags, __CONST_SOCKADDR_ARG given, socklen_t size) {
  destination result;
  if (check(descriptor, given.__sockaddr__, size, &result) < 0) return -1;
  ssize_t sent = KERNEL(SYS_sendto, descriptor, data, length, flags, result.address, result.size);
  done(&result);
  return sent;
}

ssize_t sendmsg(int descriptor, const struct msghdr* message, int flags) {
  destination result;
  if (!protects || message == NULL || message->msg_name == NULL) return KERNEL(SYS_sendmsg, descriptor, message, flags);
  if (check(descriptor, message->msg_name, message->msg_namelen, &result) < 0) return -1;
  struct msghdr fresh = *message;
  fresh.msg_name = (void*)result.address;
  fresh.msg_namelen = result.size;
  ssize_t sent = KERNEL(SYS_sendmsg, descriptor, &fresh, flags);
  done(&result);
  return sent;
}

int sendmmsg(int descriptor, struct mmsghdr* messages, unsigned count, int flags) {
  bool named = false;
  for (unsigned i = 0; protects && i < count; i++) named = named || messages[i].msg_hdr.msg_name != NULL;
  if (!named) return (int)KERNEL(SYS_sendmmsg, descriptor, messages, count, flags);
  for (unsigned i = 0; i < count; i++) {
    ssize_t sent = sendmsg(descriptor, &messages[i].msg_hdr, flags);
    if (sent < 0) return i == 0 ? -1 : (int)i;
    messages[i].msg_len = (unsigned)sent;
  }
  return (int)count;
}

// ---- addresses that are returned

static bool has_room(const void* address, const socklen_t* size) {
  return protects && address != NULL && size != NULL && (int)*size > 0;
}

int getsockname(int descriptor, __SOCKADDR_ARG given, socklen_t* size) {
  struct sockaddr* address = given.__sockaddr__;
  socklen_t room = has_room(address, size) ? *size : 0;
  int status = (int)KERNEL(SYS_getsockname, descriptor, address, size);
  if (status == 0 && room > 0) restore_path(address, room, size);
  return status;
}

int getpeername(int descriptor, __SOCKADDR_ARG given, socklen_t* size) {
  struct sockaddr* address = given.__sockaddr__;
  socklen_t room = has_room(address, size) ? *size : 0;
  int status = (int)KERNEL(SYS_getpeername, descriptor, address, size);
  if (status == 0 && room > 0) restore_path(address, room, size);
  return status;
}

// The functions that wait are those of the C library: a thread may be cancelled in them.
int accept(int descriptor, __SOCKADDR_ARG given, socklen_t* size) {
  struct sockaddr* address = given.__sockaddr__;
  socklen_t room = has_room(address, size) ? *size : 0;
  int connection = NEXT(accept)(descriptor, address, size);
  if (connection >= 0 && room > 0) restore_path(address, room, size);
  return connection;
}

int accept4(int descriptor, __SOCKADDR_ARG given, socklen_t* size, int flags) {
  struct sockaddr* address = given.__sockaddr__;
  socklen_t room = has_room(address, size) ? *size : 0;
  int connection = NEXT(accept4)(descriptor, address, size, flags);
  if (connection >= 0 && room > 0) restore_path(address, room, size);
  return connection;
}

ssize_t recvfrom(int descriptor, void* data, size_t length, int flags, __SOCKADDR_ARG given, socklen_t* size) {
  struct sockaddr* address = given.__sockaddr__;
  socklen_t room = has_room(address, size) ? *size : 0;
  ssize_t received = NEXT(recvfrom)(descriptor, data, length, flags, address, size);
  if (received >= 0 && room > 0) restore_path(address, room, size);
  return received;
}

ssize_t __recvfrom_chk(int descriptor, void* data, size_t length, size_t data_room, int flags, __SOCKADDR_ARG given,
                       socklen_t* size) {
  if (length > data_room) abort();
  return recvfrom(descriptor, data, length, flags, given, size);
}

ssize_t recvmsg(int descriptor, struct msghdr* message, int flags) {
  socklen_t room = message != NULL && has_room(message->msg_name, &message->msg_namelen) ? message->msg_namelen : 0;
  ssize_t received = NEXT(recvmsg)(descriptor, message, flags);
  if (received >= 0 && room > 0) restore_path(message->msg_name, room, &message->msg_namelen);
  return received;
}

int recvmmsg(int descriptor, struct mmsghdr* messages, unsigned count, int flags, struct timespec* timeout) {
  socklen_t rooms[1024];  // the kernel takes no more messages
  if (count > 1024) count = 1024;
  for (unsigned i = 0; protects && messages != NULL && i < count; i++) {
    const struct msghdr* each = &messages[i].msg_hdr;
    rooms[i] = has_room(each->msg_name, &each->msg_namelen) ? each->msg_namelen : 0;
  }
  int received = NEXT(recvmmsg)(descriptor, messages, count, flags, timeout);
  for (int i = 0; protects && i < received; i++) {
    struct msghdr* each = &messages[i].msg_hdr;
    if (rooms[i] > 0) restore_path(each->msg_name, rooms[i], &each->msg_namelen);
  }
  return received;
}

// ---- names

static bool is_number(const char* name) {
  unsigned char bytes[sizeof(struct in6_addr)];
  char text[INET6_ADDRSTRLEN + 1];
  snprintf(text, sizeof text, "%.*s", (int)strcspn(name, "%"), name);
  struct in_addr old;
  return inet_pton(AF_INET6, text, bytes) == 1 || inet_aton(name, &old) == 1;
}

static bool is_family(const char* number, int family) {
  return family == AF_UNSPEC || (strchr(number, ':') != NULL) == (family == AF_INET6);
}

static bool find_in_hosts(const char* name, int family, char* number) {
  char line[1024];
  FILE* hosts = fopen("/etc/hosts", "re");
  bool found = false;
  while (hosts != NULL && !found && fgets(line, sizeof line, hosts) != NULL) {
    char* rest = NULL;
    line[strcspn(line, "#\n")] = '\0';
    const char* first = strtok_r(line, " \t", &rest);
    if (first == NULL || strlen(first) >= INET6_ADDRSTRLEN || !is_family(first, family)) continue;
    for (const char* each; !found && (each = strtok_r(NULL, " \t", &rest)) != NULL;) found = strcasecmp(each, name) == 0;
    if (found) strcpy(number, first);
  }
  if (hosts != NULL) fclose(hosts);
  return found;
}

// The address of a name that is known without a server, as text.
static bool find_number(const char* name, int family, char* number) {
  char own[256] = "";
  size_t length = strlen(name);
  int before = errno;
  if (is_number(name)) return snprintf(number, INET6_ADDRSTRLEN + 32, "%s", name) < INET6_ADDRSTRLEN + 32;
  bool found = find_in_hosts(name, family, number);
  bool is_local = strcasecmp(name, "localhost") == 0 || (length > 10 && strcasecmp(name + length - 10, ".localhost") == 0);
  gethostname(own, sizeof own - 1);
  if (!found && (is_local || strcasecmp(name, own) == 0)) {
    strcpy(number, family == AF_INET6 ? "::1" : "127.0.0.1");
    found = true;
  }
  errno = before;
  return found;
}

int getaddrinfo(const char* name, const char* service, const struct addrinfo* hints, struct addrinfo** result) {
  char number[INET6_ADDRSTRLEN + 32];
  if (!protects || name == NULL) return NEXT(getaddrinfo)(name, service, hints, result);
  if (!find_number(name, hints == NULL ? AF_UNSPEC : hints->ai_family, number))
    return hints != NULL && hints->ai_flags & AI_NUMERICHOST ? EAI_NONAME : EAI_AGAIN;
  int status = NEXT(getaddrinfo)(number, service, hints, result);
  if (status == 0 && (*result)->ai_canonname != NULL) {
    char* copy = strdup(name);
    if (copy != NULL) {
      free((*result)->ai_canonname);
      (*result)->ai_canonname = copy;
    }
  }
  return status;
}

static struct hostent* unknown_host(void) {
  h_errno = TRY_AGAIN;
  return NULL;
}

struct hostent* gethostbyname2(const char* name, int family) {
  char number[INET6_ADDRSTRLEN + 32];
  if (!protects) return NEXT(gethostbyname2)(name, family);
  return find_number(name, family, number) ? NEXT(gethostbyname2)(number, family) : unknown_host();
}
struct hostent* gethostbyname(const char* name) {
  if (!protects) return NEXT(gethostbyname)(name);
  return gethostbyname2(name, AF_INET);
}
int gethostbyname2_r(const char* name, int family, struct hostent* host, char* buffer, size_t size, struct hostent** result,
                     int* error) {
  char number[INET6_ADDRSTRLEN + 32];
  if (!protects) return NEXT(gethostbyname2_r)(name, family, host, buffer, size, result, error);
  if (find_number(name, family, number)) return NEXT(gethostbyname2_r)(number, family, host, buffer, size, result, error);
  *result = NULL;
  *error = TRY_AGAIN;
  return 0;
}
int gethostbyname_r(const char* name, struct hostent* host, char* buffer, size_t size, struct hostent** result, int* error) {
  if (!protects) return NEXT(gethostbyname_r)(name, host, buffer, size, result, error);
  return gethostbyname2_r(name, AF_INET, host, buffer, size, result, error);
}

static bool is_known_address(const void* address, socklen_t size) {
  char number[INET6_ADDRSTRLEN], name[8], line[1024];
  if (inet_ntop(size == 4 ? AF_INET : AF_INET6, address, number, sizeof number) == NULL) return false;
  FILE* hosts = fopen("/etc/hosts", "re");
  bool found = false;
  while (hosts != NULL && !found && fgets(line, sizeof line, hosts) != NULL) {
    size_t length = strlen(number);
    found = strncmp(line, number, length) == 0 && sscanf(line + length, " %7s", name) == 1 && name[0] != '#';
  }
  if (hosts != NULL) fclose(hosts);
  return found;
}

struct hostent* gethostbyaddr(const void* address, socklen_t size, int family) {
  if (protects && !is_known_address(address, size)) return unknown_host();
  return NEXT(gethostbyaddr)(address, size, family);
}
int gethostbyaddr_r(const void* address, socklen_t size, int family, struct hostent* host, char* buffer, size_t room,
                    struct hostent** result, int* error) {
  if (protects && !is_known_address(address, size)) {
    *result = NULL;
    *error = TRY_AGAIN;
    return 0;
  }
  return NEXT(gethostbyaddr_r)(address, size, family, host, buffer, room, result, error);
}

int getnameinfo(const struct sockaddr* address, socklen_t size, char* host, socklen_t host_size, char* service,
                socklen_t service_size, int flags) {
  bool known = true;
  if (protects && address->sa_family == AF_INET) known = is_known_address(&((const struct sockaddr_in*)address)->sin_addr, 4);
  if (protects && address->sa_family == AF_INET6) known = is_known_address(inner_address(address), 16);
  if (!known && flags & NI_NAMEREQD) return EAI_AGAIN;
  return NEXT(getnameinfo)(address, size, host, host_size, service, service_size, known ? flags : flags | NI_NUMERICHOST);
}

// The functions of the resolver, under the names that programs of different ages use.
#define RESOLVER(name)                                                                \
  int name(long a, long b, long c, long d, long e, long f) {                          \
    int (*real)(long, long, long, long, long, long) =                                 \
        (int (*)(long, long, long, long, long, long))(uintptr_t)next_function(#name); \
    if (!protects && real != NULL) return real(a, b, c, d, e, f);                     \
    h_errno = TRY_AGAIN;                                                              \
    return -1;                                                                        \
  }
RESOLVER(res_query)
RESOLVER(res_search)
RESOLVER(res_send)
RESOLVER(res_nquery)
RESOLVER(res_nsearch)
RESOLVER(res_nsend)
RESOLVER(__res_query)
RESOLVER(__res_search)
RESOLVER(__res_send)
RESOLVER(__res_nquery)
RESOLVER(__res_nsearch)
RESOLVER(__res_nsend)
