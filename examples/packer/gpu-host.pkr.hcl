# A GPU image, built in a virtual machine without a GPU:
#   ssh-keygen -q -t ed25519 -N '' -f build-key
#   packer build -var base=URL-OF-A-DISTRIBUTION'S-CLOUD-IMAGE.qcow2 -var base_sha256=ITS-SHA-256 gpu-host.pkr.hcl
#   rm build-key build-key.pub
# The key is for this build alone: the last provisioner removes it from the image. No password is set.
# The same provisioner works with every builder of Packer's (amazon-ebs, googlecompute, …).

variable "base" {
  type = string
}

variable "base_sha256" {
  type = string
}

variable "wheel" {
  type    = string
  default = "https://example.org/gpuprov-0.1.0-py3-none-any.whl"
}

# The private key of the build; KEY.pub lies beside it.
variable "key" {
  type    = string
  default = "build-key"
}

source "qemu" "gpu-host" {
  iso_url              = var.base
  iso_checksum         = var.base_sha256
  disk_image           = true
  disk_size            = "20G"
  format               = "qcow2"
  headless             = true
  memory               = 4096
  # The seed by which cloud-init (NoCloud) lets the key in.
  cd_files             = ["${path.root}/seed/user-data", "${path.root}/seed/meta-data", "${var.key}.pub"]
  cd_label             = "cidata"
  ssh_username         = "root"
  ssh_private_key_file = var.key
  ssh_timeout          = "20m"
  shutdown_command     = "systemctl poweroff"
}

build {
  sources = ["source.qemu.gpu-host"]

  provisioner "shell" {
    inline = [
      "apt-get -qq update && apt-get -qq install -y python3-venv",
      "python3 -m venv /opt/gpuprov && /opt/gpuprov/bin/pip install ${var.wheel}",
    ]
  }

  # The last provisioner: it removes the SSH host keys and the build's key. Packer's open connection still shuts the
  # machine down.
  provisioner "shell" {
    inline = [
      "/opt/gpuprov/bin/gpuprov install --image -e gpuprov_driver_version=580 -e gpuprov_image_gpus=ampere -e gpuprov_image_nvswitch=false",
      "rm -rf /root/.ssh/authorized_keys /root/.cache /root/.bash_history",
      "cloud-init clean --logs",
    ]
  }
}
