"""Runs the pods of packaging/kubernetes with podman, which applies the same restrictions.

podman knows pods and configuration maps, but neither services nor jobs. So this program turns the
Deployment and the Job into pods, and replaces the name of the service by the server's address.

Arguments: the folder with the manifests, and the release's image (name and tag). The image with the
RDMA programs must exist. `podman` is found in PATH; CONTAINERS_CONF may configure it.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import time

import yaml

NETWORK = "iwarp-trial"
# How often a pod is started again, as `backoffLimit` does, for example until the server is ready.
ATTEMPTS = 10


def podman(*arguments, check=True):
    """Run podman, print the command and its output, and return the output."""
    print("+ podman", *arguments, flush=True)
    done = subprocess.run(
        ["podman", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    print(done.stdout, end="", flush=True)
    if check and done.returncode != 0:
        sys.exit("podman failed with status {}".format(done.returncode))
    return done.stdout


def documents(folder, name):
    """Return the documents of a manifest."""
    return list(yaml.safe_load_all((folder / name).read_text()))


def pod(name, spec):
    """Return a pod with this name and specification."""
    # With the policy of a Deployment, podman 4 restarts init containers.
    spec = dict(spec, restartPolicy="Never")
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def play(folder, manifest, image):
    """Start a pod. The init containers use `image`."""
    name, spec = manifest["metadata"]["name"], manifest["spec"]
    # podman's volumes are not private to a pod.
    volume = name + "-volume"
    spec["volumes"][0]["name"] = volume
    for container in spec["initContainers"] + spec["containers"]:
        container["volumeMounts"][0]["name"] = volume
        if container in spec["initContainers"]:
            container["image"] = image
        else:
            container["image"] = "localhost/" + container["image"]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(manifest, file)
        file.flush()
        environment = str(folder / "environment.yaml")
        start = ["kube", "play", "--network", NETWORK, "--configmap", environment, file.name]
        for _ in range(ATTEMPTS):
            # podman 4 sometimes removes an init container before it has ended, which fails.
            if "Error: " not in podman(*start, check=False):
                return
            podman("pod", "rm", "--force", "--time", "0", name)
    sys.exit("podman has not started {}".format(name))


def require_restrictions(container):
    """Fail unless podman has applied the security context of the manifests."""
    (state,) = json.loads(
        subprocess.run(["podman", "inspect", container], stdout=subprocess.PIPE, check=True).stdout
    )
    restrictions = {
        "user": state["Config"]["User"].split(":")[0] == "12345",
        "read-only root": state["HostConfig"]["ReadonlyRootfs"],
        "no capabilities": not state["EffectiveCaps"],
        "no new privileges": "no-new-privileges" in state["HostConfig"]["SecurityOpt"],
    }
    print("restrictions:", restrictions)
    if not all(restrictions.values()):
        sys.exit("podman has not applied all restrictions")


def finish(name):
    """Wait for a pod's program. Return its status and output."""
    container = name + "-program"
    status = podman("wait", container).strip()
    return status, podman("logs", container)


def show_devices(folder, image):
    """Run the pod that lists its devices, and check what the programs print."""
    (manifest,) = documents(folder, "devices.yaml")
    play(folder, manifest, image)
    status, said = finish(manifest["metadata"]["name"])
    require_restrictions(manifest["metadata"]["name"] + "-program")
    wanted = ["hca_id:\tiwarp0", "CA 'iwarp0'", "State: Active", "Transport: rc_verbs"]
    missing = [text for text in wanted if text not in said]
    if status != "0" or missing:
        sys.exit("status {}, missing output: {}".format(status, missing))


def measure(folder, image):
    """Run the server and the client in two pods."""
    manifests = documents(folder, "bandwidth.yaml")
    templates = {
        manifest["kind"]: manifest["spec"]["template"]["spec"]
        for manifest in manifests
        if "template" in manifest["spec"]
    }
    play(folder, pod("rdma-server", templates["Deployment"]), image)
    infra = podman("pod", "inspect", "rdma-server", "--format", "{{.InfraContainerID}}").strip()
    form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    address = podman("inspect", infra, "--format", form).strip()
    client = templates["Job"]
    (program,) = client["containers"]
    program["command"] = [address if w == "rdma-server" else w for w in program["command"]]
    for attempt in range(ATTEMPTS):
        play(folder, pod("rdma-client", json.loads(json.dumps(client))), image)
        status, said = finish("rdma-client")
        if status == "0":
            break
        podman("pod", "rm", "--force", "--time", "0", "rdma-client")
        time.sleep(1)
    else:
        sys.exit("the client has failed {} times".format(ATTEMPTS))
    require_restrictions("rdma-client-program")
    if "BW average" not in said:
        sys.exit("the client has measured nothing")


def main():
    """Run the pods, and remove them."""
    folder, image = pathlib.Path(sys.argv[1]), sys.argv[2]
    podman("network", "create", NETWORK)
    try:
        show_devices(folder, image)
        measure(folder, image)
    finally:
        podman("pod", "rm", "--all", "--force", "--time", "0", check=False)
        podman("network", "rm", "--force", NETWORK, check=False)


main()
