/* Tests in unusual environments: threads with small stacks, a sandbox that refuses system calls,
 * and a thread that moves to another network namespace. */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <fcntl.h>
#include <unistd.h>

#include "connection.h"

enum { SMALL_STACK = 64 * 1024 };

static void *run_server(void *p)
{
	struct peer *peer = p;

	accept_connection(peer);
	for (int i = 0; i < 20; i++)
		exchange_words(peer, "pong", "ping");
	rdma_ack_cm_event(next_event(peer, RDMA_CM_EVENT_DISCONNECTED));
	end_connection(peer);
	return NULL;
}

static void *run_client(void *p)
{
	struct peer *peer = p;

	for (int i = 0; i < 20; i++)
		exchange_words(peer, "ping", "pong");
	CODE(0, rdma_disconnect(peer->id));
	rdma_ack_cm_event(next_event(peer, RDMA_CM_EVENT_DISCONNECTED));
	end_connection(peer);
	return NULL;
}

static int port;

static void *connect_and_run_client(void *p)
{
	connect_to_port(p, port);
	return run_client(p);
}

/* Connects two threads with stacks of this size. The threads also initialize the library. */
static void connect_on_stacks(size_t size)
{
	static struct peer server, client;
	pthread_t threads[2];
	pthread_attr_t attr;

	memset(&server, 0, sizeof(server));
	memset(&client, 0, sizeof(client));
	port = listen_on_free_port(&server);
	NEED(pthread_attr_init(&attr) == 0 && pthread_attr_setstacksize(&attr, size) == 0);
	NEED(pthread_create(&threads[0], &attr, run_server, &server) == 0);
	NEED(pthread_create(&threads[1], &attr, connect_and_run_client, &client) == 0);
	for (int i = 0; i < 2; i++)
		NEED(pthread_join(threads[i], NULL) == 0);
	pthread_attr_destroy(&attr);
}

/* Runs `body` in a child process, and adds its checks to those of this process. */
static void in_child(void (*body)(void))
{
	int status = 0, counts[2] = { 0 }, pipes[2];
	pid_t child;

	NEED(pipe(pipes) == 0);
	fflush(stdout);
	child = fork();
	NEED(child >= 0);
	if (child == 0) {
		checks = failures = 0;
		body();
		counts[0] = checks;
		counts[1] = failures;
		NEED(write(pipes[1], counts, sizeof(counts)) == sizeof(counts));
		exit(0);
	}
	close(pipes[1]);
	CHECK(read(pipes[0], counts, sizeof(counts)) == sizeof(counts));
	close(pipes[0]);
	NEED(waitpid(child, &status, 0) == child);
	CODE(0, status);
	checks += counts[0];
	failures += counts[1];
}

static void test_small_stacks(void)
{
	connect_on_stacks(SMALL_STACK);
	connect_on_stacks(SMALL_STACK);
}

/* System calls that sandboxes refuse, and that the library or its dependencies may use. */
static const int refused[] = {
	SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register, SYS_sched_yield,
		SYS_sched_getaffinity, SYS_sched_setaffinity,
	SYS_sched_getscheduler, SYS_sched_setscheduler, SYS_sched_getparam, SYS_sched_setparam,
		SYS_sched_setattr, SYS_sched_getattr,
	SYS_userfaultfd, SYS_pidfd_open, SYS_pidfd_send_signal, SYS_process_vm_readv,
		SYS_process_vm_writev, SYS_membarrier,
	SYS_get_mempolicy, SYS_mbind, SYS_perf_event_open, SYS_bpf, SYS_getcpu, SYS_epoll_pwait2,
		SYS_memfd_create, SYS_ptrace,
	SYS_kcmp, SYS_setpriority, SYS_mlock, SYS_mlock2, SYS_timerfd_create, SYS_getrusage,
};

enum { REFUSED = sizeof(refused) / sizeof(refused[0]) };

/* Makes these system calls fail with `error`, in this thread and in threads that it starts. */
static void enter_sandbox(int error)
{
	struct sock_filter filter[REFUSED + 3];
	struct sock_fprog program = { .len = REFUSED + 3, .filter = filter };

	filter[0] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
		offsetof(struct seccomp_data, nr));
	for (int i = 0; i < REFUSED; i++)
		filter[1 + i] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)refused[i],
			(unsigned char)(REFUSED - i), 0);
	filter[REFUSED + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	filter[REFUSED + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K,
		SECCOMP_RET_ERRNO | (unsigned)error);
	NEED(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
	NEED(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
	MINUS_ONE(error, (int)syscall(SYS_sched_yield));
	MINUS_ONE(error, (int)syscall(SYS_getrusage, 0, NULL));
}

static void test_sandbox_eperm(void)
{
	enter_sandbox(EPERM);
	connect_on_stacks(1 << 20);
}

static void test_sandbox_enosys(void)
{
	enter_sandbox(ENOSYS);
	connect_on_stacks(1 << 20);
}

static void bring_up_loopback(void)
{
	struct ifreq request = { .ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING };
	int fd = socket(AF_INET, SOCK_DGRAM, 0);

	NEED(fd >= 0 && ioctl(fd, SIOCSIFFLAGS, &request) == 0);
	close(fd);
}

/* Moves to a new network namespace. Returns 0 if that is not allowed. */
static int enter_new_network(void)
{
	uid_t uid = getuid();
	char map[40];
	int fd;

	if (unshare(uid ? CLONE_NEWUSER | CLONE_NEWNET : CLONE_NEWNET) != 0) {
		fprintf(stderr, "skipped: no network namespace: %s\n", strerror(errno));
		return 0;
	}
	if (uid) {
		fd = open("/proc/self/uid_map", O_WRONLY);
		snprintf(map, sizeof(map), "0 %u 1\n", (unsigned)uid);
		NEED(fd >= 0 && write(fd, map, strlen(map)) == (ssize_t)strlen(map));
		close(fd);
	}
	bring_up_loopback();
	return 1;
}

static void *run_server_for_two(void *p)
{
	struct peer *peer = p, second = { 0 };

	accept_connection(peer);
	for (int i = 0; i < 3; i++)
		exchange_words(peer, "pong", "ping");
	/* The listener is still in the first namespace. */
	second.channel = peer->channel;
	accept_connection(&second);
	exchange_words(&second, "pong", "ping");
	rdma_ack_cm_event(next_event(peer, RDMA_CM_EVENT_DISCONNECTED));
	rdma_ack_cm_event(next_event(peer, RDMA_CM_EVENT_DISCONNECTED));
	second.channel = rdma_create_event_channel();
	end_connection(&second);
	end_connection(peer);
	return NULL;
}

/* A connection survives when a thread that uses it moves to another network namespace. In that
 * namespace the thread cannot connect to the server. After its return, it can. */
static void test_network_namespace(void)
{
	static struct peer server, client, later;
	struct sockaddr_in addr = { .sin_family = AF_INET };
	struct rdma_cm_id *lost;
	pthread_t thread;
	int first;

	if (!enter_new_network())
		return;
	port = listen_on_free_port(&server);
	NEED(pthread_create(&thread, NULL, run_server_for_two, &server) == 0);
	connect_to_port(&client, port);
	exchange_words(&client, "ping", "pong");
	first = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
	NEED(first >= 0 && unshare(CLONE_NEWNET) == 0);
	exchange_words(&client, "ping", "pong");

	/* No interface is up in this namespace. The call fails, or an event reports the failure. */
	addr.sin_port = htons((uint16_t)port);
	addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	NEED(rdma_create_id(client.channel, &lost, NULL, RDMA_PS_TCP) == 0);
	if (rdma_resolve_addr(lost, NULL, (struct sockaddr *)&addr, 2000) == 0) {
		struct rdma_cm_event *event;

		NEED(rdma_get_cm_event(client.channel, &event) == 0);
		CHECK(event->event == RDMA_CM_EVENT_ADDR_ERROR && event->status != 0);
		rdma_ack_cm_event(event);
	} else {
		CHECK(errno == ENODEV || errno == ENETUNREACH || errno == EADDRNOTAVAIL || errno == EHOSTUNREACH);
	}
	CODE(0, rdma_destroy_id(lost));
	exchange_words(&client, "ping", "pong");

	NEED(setns(first, CLONE_NEWNET) == 0);
	close(first);
	connect_to_port(&later, port);
	exchange_words(&later, "ping", "pong");
	CODE(0, rdma_disconnect(later.id));
	CODE(0, rdma_disconnect(client.id));
	rdma_ack_cm_event(next_event(&later, RDMA_CM_EVENT_DISCONNECTED));
	rdma_ack_cm_event(next_event(&client, RDMA_CM_EVENT_DISCONNECTED));
	end_connection(&later);
	end_connection(&client);
	NEED(pthread_join(thread, NULL) == 0);
}

int main(void)
{
	in_child(test_small_stacks);
	in_child(test_sandbox_eperm);
	in_child(test_sandbox_enosys);
	in_child(test_network_namespace);
	test_small_stacks();
	return result();
}
